"""Replaces a trainer's `compute_loss` under a plan: the loss of a micro-batch whose tokens lie on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.losses.batch_means import BatchMeans
from fcp_cli.integrations.transformers.loss import put_loss_head
from fcp_cli.runtime.loss.labels import IGNORED
from fcp_cli.runtime.loss.token_loss import Labels, token_loss_sum
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step

# Settings with which models change their head's logits.
_LOGITS_CHANGED_BY = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


class PlannedLoss(ABC):
    """The loss of a trainer under a plan.

    Args:
        means: the means of the trainer's own batches, if the loss is the mean of their means; None: of all tokens
            alike.

    Attributes:
        mean_over: loss denominator: tokens or rows of the global batch.
    """

    def __init__(self, means: BatchMeans | None = None) -> None:
        self._means = means
        self.mean_over: Literal["tokens", "rows"] = "tokens" if means is None else "rows"

    def begin_step(self, step: Step) -> None:
        """Prepare for a step. Every rank calls it, before the first micro-batch."""
        if self._means is not None:
            self._means.begin_step(step.index)

    @abstractmethod
    def of(self, model: Any, microbatch: LocalMicroBatch) -> Tensor:
        """Run the model on a micro-batch; return this rank's share of the step's loss, to call backward on."""

    def end_step(self, session: Session, step: Step) -> None:  # noqa: B027  # most log nothing else
        """Log the trainer's figures other than the loss. Every rank calls it, after the step's last micro-batch."""


class CausalLoss(PlannedLoss):
    """The loss of `transformers.Trainer`: the mean over the learned tokens of the global batch, or over its batches.

    If nothing changes a linear head's logits afterwards, the head returns the sum of token losses, so that
    logits exist only a part at a time.

    Args:
        model: the model of transformers, not wrapped.
        smoothing: share of each label that all tokens of the vocabulary have between them.
        means: as of `PlannedLoss`.
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
                f"{type(model).__name__} does not hand on what its head answers, which the plan's loss is computed from"
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
    """Return the logits [rows, tokens, vocabulary] that `logits_to_keep` of transformers' models asks for."""
    if keep is None or (isinstance(keep, int) and not keep):
        return logits
    return logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
