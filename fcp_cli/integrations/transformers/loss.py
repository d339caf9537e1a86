"""Let a transformers model compute its loss inside its forward, from hidden states instead of logits.

    loss = microbatch.normalised(model(..., labels=microbatch.labels).loss)

Inside, because there the head's weight is whole, whatever shards the model, and the hooks of DDP and FSDP2 that belong
to the head run as ever. The head is told before each call which labels belong to it and answers with the sum of their
losses in place of logits; without labels it is the linear layer that it was.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fcp_cli.errors import RunError
from fcp_cli.runtime.loss.token_loss import Labels, head_loss_sum
from fcp_cli.runtime.ring_attention.ring import Ring


class LossHead(nn.Linear):
    """A linear head, with the parameters of another, that may answer with a loss."""

    def __init__(self, head: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        self.train(head.training)
        self.labels: Labels | None = None
        self.loss_sum: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits [1, tokens, vocabulary], or the sum of token losses (0-d) where labels were given."""
        if self.labels is None:
            return super().forward(hidden)
        self.loss_sum = head_loss_sum(hidden, self, self.labels)
        return self.loss_sum


def put_loss_head(model: PreTrainedModel) -> LossHead | None:
    """Put a `LossHead` in place of a model's linear head and return it; None for a model with none or another."""
    head = _head(model)
    if isinstance(head, LossHead):
        return head
    if type(head) is not nn.Linear:
        return None
    model.set_output_embeddings(found := LossHead(head))  # type: ignore[no-untyped-call]
    return found


def prepare_loss(model: PreTrainedModel) -> None:
    """Let a model of a linear head answer to the micro-batch's labels with the sum of their losses."""
    if type(_head(model)) is not nn.Linear:
        return
    put_loss_head(model)
    model.register_forward_pre_hook(_tell_head, with_kwargs=True)
    model.register_forward_hook(_take_loss)


def takes_labels(model: PreTrainedModel, labels: Any, ring: Ring) -> bool:
    """Return whether a model computes its loss from these labels: only a micro-batch's own are next-token labels."""
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
    """Move the loss from where the model put what its head answered to where a model's loss is."""
    head = _head(module)
    if not isinstance(head, LossHead) or head.labels is None:
        return None
    loss_sum, head.labels, head.loss_sum = head.loss_sum, None, None
    if loss_sum is None or getattr(output, "logits", None) is not loss_sum:
        raise RunError(
            f"{type(module).__name__} changes the logits of its head, so that the loss needs them; leave out labels, "
            "and use microbatch.loss(logits)"
        )
    return replace(output, loss=loss_sum, logits=None)


def _head(model: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head
