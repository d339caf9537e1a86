"""Token weights that make a plan's loss the mean of batch means, as the Trainer computes it for some models.

For models whose `accepts_loss_kwargs` is False (Qwen's vision models, Gemma 3), the Trainer first averages the loss
over the labeled tokens of each batch, then over all batches of the optimizer step. A plan packs rows differently, so
each token is weighted as in the script's own batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session


class BatchMeans:
    """Per-token loss weights of a job, computed step by step.

    Args:
        session: session of this rank.
        learned: manifest row -> number of labeled tokens, for rows read by this rank.
        batch_rows: batch size of the trainer (`per_device_train_batch_size`).
    """

    def __init__(self, session: Session, learned: Mapping[int, int], batch_rows: int) -> None:
        self._session, self._learned, self._batch_rows = session, learned, batch_rows
        self._planned: Iterator[StepPlan] | None = None
        self._weight_of_row: dict[int, float] = {}

    def begin_step(self, step: int) -> None:
        """Compute the weights of a step's rows. Collective over all ranks; the first of each ring counts labels."""
        planned = self._step(step)
        rows = own_batches(planned, self._session.metadata.seed if self._session.metadata.shuffle else None)
        place = {row: number for number, row in enumerate(rows.tolist())}
        learned = torch.zeros(len(rows), dtype=torch.int64, device=self._session.device)
        leaders = planned.ranks[planned.rank_offsets[:-1]]
        for led in np.flatnonzero(leaders == self._session.rank).tolist():
            for row in planned.microbatch(led).sequences:
                learned[place[row]] = self._learned[row]
        self._session.world.all_reduce_sum(learned)
        self._weight_of_row = dict(zip(rows.tolist(), weights_of(learned.tolist(), self._batch_rows), strict=True))

    def _step(self, step: int) -> StepPlan:
        if self._session.source is not None:
            return self._session.source.current
        if self._planned is None:
            self._planned = PlanReader(self._session.plan).steps(step)
        return next(self._planned)

    def weights(self, microbatch: LocalMicroBatch) -> Tensor:
        """Return the weights [1, tokens] of this rank's tokens; `normalised` divides the weighted sum by the rows."""
        row = microbatch.row
        found = {
            one: torch.full((length,), self._weight_of_row[one])
            for one, length in zip(row.sequences, row.lengths, strict=True)
        }
        return microbatch.part_of(found)


def own_batches(step: StepPlan, seed: int | None) -> IntArray:
    """Return the manifest rows of a step in the order in which the script's loader would batch them.

    Args:
        step: step of the plan.
        seed: seed of a shuffled plan, which determines the order; None: order of the data.
    """
    rows: IntArray = np.sort(step.sequences)
    return rows if seed is None else np.random.default_rng([seed, step.step]).permutation(rows)


def weights_of(learned: list[int], batch_rows: int) -> list[float]:
    """Return the weight of each row's tokens, multiplied by the number of rows.

    Args:
        learned: number of labeled tokens of each row, in batch order.
        batch_rows: rows per batch; the last batch may be smaller.
    """
    starts = np.arange(0, len(learned), batch_rows)
    totals = np.maximum(np.add.reduceat(learned, starts), 1)
    weights: list[float] = (len(learned) / len(starts) / np.repeat(totals, batch_rows)[: len(learned)]).tolist()
    return weights
