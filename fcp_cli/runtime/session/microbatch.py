"""One rank's part of one micro-batch: its tokens, its ring and its share of the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.agreement.plan_agreement import NO_TRAINING
from fcp_cli.runtime.data.loader import Shard
from fcp_cli.runtime.gradients.forward import without_backward
from fcp_cli.runtime.guards.guards import NO_BACKWARD, OTHER_LOSS, Guards
from fcp_cli.runtime.loss.token_loss import Labels, head_loss_sum, token_loss_sum
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.session.token_values import part_of, token_log_probs


class LocalMicroBatch:
    """One rank's part of one micro-batch.

    Attributes:
        row: the micro-batch in the plan.
        input_ids, labels: [1, tokens] int64 on the session's device; at least one token.
        position_ids: the same, or [axes, 1, tokens] if `fetch` returned positions.
        ring: group that `attention` runs on; current while the loop body runs. Pass it on if attention runs later.
        is_last: whether this is the rank's last micro-batch of the step.
        pack_labels: [tokens of the pack] int64 on the host, for packs of joined sequences; else None.
    """

    __slots__ = (
        "_backwards", "_denominator", "_guards", "_layout", "_losses",
        "input_ids", "is_last", "labels", "loss_sum", "pack_labels", "position_ids", "ring", "row",
    )  # fmt: skip

    def __init__(
        self,
        shard: Shard,
        ring: Ring,
        device: torch.device,
        *,
        is_last: bool,
        guards: Guards,
        denominator: int | Tensor,
    ) -> None:
        self.row: MicroBatch = shard.row
        self._layout = shard.layout
        self.ring = ring
        self.is_last = is_last
        self.input_ids = shard.input_ids.to(device, non_blocking=True)
        self.position_ids = shard.position_ids.to(device, non_blocking=True)
        self.labels = shard.labels.to(device, non_blocking=True)
        rows = None if shard.labelled is None else shard.labelled.to(device, non_blocking=True)
        ring.context.labels = Labels(values=self.labels, rows=rows)
        ring.context.model_tokens = shard.input_ids.shape[1]
        # Until the backward of a loss begins that this micro-batch made.
        ring.context.loss_missing = f"{ring.place}: {OTHER_LOSS if guards.sync.trains else NO_TRAINING}"
        self.pack_labels = shard.pack_labels
        self.loss_sum: Tensor | None = None
        self._guards = guards
        self._denominator = denominator
        self._losses = self._backwards = 0

    def loss(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the step's loss, to call backward on.

        It is the sum of its token losses / `denominator`, times the factor that undoes the average of FSDP2
        and DeepSpeed.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return self.normalised(token_loss_sum(logits, self.labels))

    def loss_of(self, hidden: Tensor, head: nn.Linear | Tensor) -> Tensor:
        """Return the same loss as `loss` without materializing all logits: they are computed and dropped in blocks.

        Args:
            hidden: [1, tokens, width] inputs of the head, for `input_ids`.
            head: the model's linear output layer, or its weight [vocabulary, width].

        Raises:
            RunError: the head's weight is sharded, as outside the forward of a model that `fully_shard` wraps.
        """
        assert self.ring.context.labels is not None
        return self.normalised(head_loss_sum(hidden, head, self.ring.context.labels))

    @property
    def loss_factor(self) -> float:
        """Return the factor in the loss that undoes the model wrapper's division of gradients."""
        return self._guards.sync.loss_factor

    @property
    def denominator(self) -> int | Tensor:
        """Return the loss denominator of the step: its tokens with labels, or its rows."""
        return self._denominator

    def normalised(self, loss_sum: Tensor) -> Tensor:
        """Return this rank's share of the loss from a sum of token losses (0-d) that the script computed itself."""
        self.loss_sum = loss_sum.detach()
        loss = loss_sum * self._guards.sync.loss_factor / self._denominator
        # The checks are the host's, and would break a graph.
        if not torch.compiler.is_compiling():
            self._guards.see_loss(self.ring.place, self.row, self.loss_sum, loss)
        if not self._guards.sync.trains:
            return without_backward(loss, self.ring.place)
        if loss.requires_grad:
            self._losses += 1
            # Runs first in the loss's backward, before any layer's own asks whether it may run.
            loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return loss

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return [1, tokens] the log-probability of each label, 0 if a token has none.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return token_log_probs(logits, self.labels)

    def part_of(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return [1, tokens, ...] this rank's shard of values per token: log-probabilities, advantages, chosen experts.

        Args:
            values: manifest row -> [length, ...], as `Step.collect` returns them.

        Raises:
            RunError: a sequence has no values, or not as many as tokens.
        """
        return part_of(values, self.row, self._layout, self.ring.index).to(self.input_ids.device)

    def _note_backward(self, _: Tensor) -> None:
        self._backwards += 1
        self.ring.context.loss_missing = ""

    def require_backward(self) -> None:
        """Raise RunError if a loss was made to be trained on, and no backward was run."""
        if self._losses and not self._backwards:
            raise RunError(f"{self.ring.place}: {NO_BACKWARD}")
