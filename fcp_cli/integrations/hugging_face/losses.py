"""Planned losses, which replace a trainer's `compute_loss` for micro-batches sharded over several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.integrations.transformers.loss import put_loss_head
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.loss import Labels, token_loss_sum
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.step import LocalMicroBatch, Step
from fcp_cli.util.arrays import IntArray

# Config settings that scale or cap the logits of the head.
_LOGITS_CHANGED_BY = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


class PlannedLoss(ABC):
    """Loss of a trainer under a plan.

    Args:
        means: token weights, if the loss is a mean of batch means; None: the mean over all tokens.

    Attributes:
        mean_over: loss denominator: tokens or rows of the global batch.
    """

    def __init__(self, means: BatchMeans | None = None) -> None:
        self._means = means
        self.mean_over: Literal["tokens", "rows"] = "tokens" if means is None else "rows"

    def begin_step(self, step: Step) -> None:
        """Prepare for a step. Collective over all ranks, before the first micro-batch."""
        if self._means is not None:
            self._means.begin_step(step.index)

    @abstractmethod
    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        """Run the model on a micro-batch; return this rank's part of the step's loss, for the backward pass."""

    def end_step(self, session: Session, step: Step) -> None:  # noqa: B027  # most log nothing else
        """Log the trainer's metrics other than the loss.

        Collective over all ranks, after the last micro-batch of the step.
        """


class CausalLoss(PlannedLoss):
    """The loss of `transformers.Trainer`: the mean over labeled tokens of the global batch, or over its batch means.

    If the logits of a linear head are not modified afterwards, the head itself returns the sum of token losses, so that
    logits are only materialized in chunks.

    Args:
        model: unwrapped transformers model.
        smoothing: label smoothing factor.
        means: token weights, if the loss is a mean of batch means.
    """

    def __init__(self, model: Any, smoothing: float = 0.0, means: BatchMeans | None = None) -> None:
        super().__init__(means)
        text = model.config.get_text_config()
        changes = any(getattr(text, name, None) is not None for name in _LOGITS_CHANGED_BY)
        self._head = None if changes or smoothing else put_loss_head(model)
        self._smoothing = smoothing

    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        head, inputs = self._head, {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
        labels = microbatch.ring.context.labels
        assert labels is not None
        if self._means is not None:
            labels = replace(labels, weights=self._means.weights(microbatch))
        if head is None:
            return microbatch.normalised(self._sum(model(**inputs).logits, labels))
        head.labels = labels
        try:
            answer = model(**inputs).logits
        finally:
            head.labels = head.loss_sum = None
        if answer is None or answer.dim():
            raise RunError(
                f"{type(model).__name__} does not return the output of its head, from which the plan's loss is computed"
            )
        loss_sum: Tensor = answer
        return microbatch.normalised(loss_sum)

    def _sum(self, logits: Tensor, labels: Labels) -> Tensor:
        if not self._smoothing and labels.weights is None:
            return token_loss_sum(logits, labels.values)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = functional.cross_entropy(precise[0], labels.values[0], ignore_index=IGNORED, reduction="none")
        if self._smoothing:
            spread = -torch.log_softmax(precise[0], dim=-1).mean(-1).masked_fill(labels.values[0] == IGNORED, 0.0)
            losses = (1 - self._smoothing) * losses + self._smoothing * spread
        return (losses if labels.weights is None else losses * labels.weights[0]).sum()


def kept_logits(logits: Tensor, keep: Any) -> Tensor:
    """Return the logits [rows, tokens, vocabulary] selected by `logits_to_keep` of transformers' models."""
    if keep is None or (isinstance(keep, int) and not keep):
        return logits
    return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]


# Token weights that make a plan's loss the mean of batch means, as the Trainer computes it for some models.
#
# For models whose `accepts_loss_kwargs` is False (Qwen's vision models, Gemma 3), the Trainer first averages the loss
# over the labeled tokens of each batch, then over all batches of the optimizer step. A plan packs rows differently,
# so each token is weighted as in the script's own batches.


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
            one: torch.full((length,), self._weight_of_row[one], device="cpu")
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
