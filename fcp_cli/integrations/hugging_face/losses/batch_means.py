"""Token weights by which a plan's loss is the mean of batch means, as a Trainer computes it for some models.

For models whose `accepts_loss_kwargs` is False (Qwen's vision models, Gemma 3), the Trainer averages the loss over the
learned tokens of each of its batches first, and over all batches of the optimizer step second. A plan packs other rows
together, so each token carries the weight that it has in the script's own batches.
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
    """The weights of one job's tokens, step by step.

    Args:
        session: the session of all ranks.
        learned: manifest row -> tokens with a label, of the rows that this rank has read.
        batch_rows: rows of a batch of the trainer (`per_device_train_batch_size`).
    """

    def __init__(self, session: Session, learned: Mapping[int, int], batch_rows: int) -> None:
        self._session, self._learned, self._batch_rows = session, learned, batch_rows
        self._planned: Iterator[StepPlan] | None = None
        self._weight_of_row: dict[int, float] = {}

    def begin_step(self, step: int) -> None:
        """Count each row's learned tokens on the rank that leads its ring, and sum. Every rank calls it."""
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
        """Return [1, tokens] the weights of this rank's tokens, whose weighted sum `normalised` divides by the rows."""
        row = microbatch.row
        found = {
            one: torch.full((length,), self._weight_of_row[one])
            for one, length in zip(row.sequences, row.lengths, strict=True)
        }
        return microbatch.part_of(found)


def own_batches(step: StepPlan, seed: int | None) -> IntArray:
    """Return the manifest rows of a step in the order in which the script's loader would cut them into batches.

    Args:
        step: the step of the plan.
        seed: the seed of a shuffled plan, in whose order rows are cut at random; None: in the data's order.
    """
    rows: IntArray = np.sort(step.sequences)
    return rows if seed is None else np.random.default_rng([seed, step.step]).permutation(rows)


def weights_of(learned: list[int], batch_rows: int) -> list[float]:
    """Return the weight of a token of each row, times the number of rows.

    Args:
        learned: learned tokens of each row, in the order of batches.
        batch_rows: rows of a batch; the last one may have fewer.
    """
    starts = np.arange(0, len(learned), batch_rows)
    totals = np.maximum(np.add.reduceat(learned, starts), 1)
    weights: list[float] = (len(learned) / len(starts) / np.repeat(totals, batch_rows)[: len(learned)]).tolist()
    return weights
