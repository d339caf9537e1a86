"""Computes the loss of a transformers model inside its forward pass, from hidden states instead of logits.

    loss = microbatch.normalised(model(..., labels=microbatch.labels).loss)

Inside the forward, the head's weight is unsharded under any wrapper, and the head's hooks of DDP and FSDP2 run as
usual. With labels, set before each call, the head returns the sum of token losses instead of logits; without labels it
is an ordinary linear layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from fcp_cli.errors import RunError
from fcp_cli.runtime.loss import Labels, head_loss_sum
from fcp_cli.runtime.ring import Ring


class LossHead(nn.Linear):
    """A linear head that can return a loss instead of logits."""

    labels: Labels | None
    loss_sum: Tensor | None

    @classmethod
    def of(cls, head: nn.Linear) -> LossHead:
        """Convert a linear head in place, keeping the hooks that shard it."""
        found: Any = head
        found.__class__ = cls
        found.labels = found.loss_sum = None
        return cast(LossHead, found)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Run the head; update `loss_sum` if hooks (DeepSpeed ZeRO-3) return another tensor in the same memory."""
        found: Tensor = super().__call__(hidden)
        # Fake tensors have no data pointer, and no engine whose hooks would need it.
        if self.loss_sum is not None and found is not self.loss_sum and found.data_ptr() == self.loss_sum.data_ptr():
            self.loss_sum = found
        return found

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [1, tokens, vocabulary], or the sum of token losses (0-d) if labels were given."""
        if self.labels is None:
            return super().forward(hidden)
        self.loss_sum = head_loss_sum(hidden, self, self.labels)
        return self.loss_sum


def put_loss_head(model: PreTrainedModel) -> LossHead | None:
    """Convert a model's linear head to a `LossHead` and return it; None if its head is not linear."""
    head = _head(model)
    if isinstance(head, LossHead):
        return head
    if type(head) is not nn.Linear:
        return None
    return LossHead.of(head)


def prepare_loss(model: PreTrainedModel) -> None:
    """Make a model with a linear head return the summed loss of the micro-batch's labels."""
    if type(_head(model)) is not nn.Linear:
        return
    put_loss_head(model)
    model.register_forward_pre_hook(_tell_head, with_kwargs=True)
    model.register_forward_hook(_take_loss, prepend=True)  # before hooks of others, which may return other tensors


def takes_labels(model: PreTrainedModel, labels: Any, ring: Ring) -> bool:
    """Return whether a model may compute its loss from these labels: only from the micro-batch's own."""
    is_own = ring.context.labels is not None and labels is ring.context.labels.values
    return is_own and isinstance(_head(model), LossHead)


def _tell_head(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    head = _head(module)
    if not isinstance(head, LossHead):
        return None
    ring, labels = kwargs.get("ring"), kwargs.get("labels")
    head.labels = ring.context.labels if ring is not None and labels is not None else None
    return None if head.labels is None else (args, {**kwargs, "labels": None})


def _take_loss(module: PreTrainedModel, args: tuple[Any, ...], output: Any) -> Any:
    """Move the loss sum from `logits` to `loss` in a model's output."""
    head = _head(module)
    if not isinstance(head, LossHead) or head.labels is None:
        return None
    loss_sum, head.labels, head.loss_sum = head.loss_sum, None, None
    if loss_sum is None or getattr(output, "logits", None) is not loss_sum:
        raise RunError(
            f"{type(module).__name__} changes the logits of its head, so that the loss needs them; remove labels, and "
            "use microbatch.loss(logits)"
        )
    return replace(output, loss=loss_sum, logits=None)


def _head(model: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head
