"""One rank's shard of a micro-batch: its tokens, its ring and its share of the loss."""

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
    """One rank's shard of one micro-batch.

    Attributes:
        row: the micro-batch's row of the plan.
        input_ids, labels: [1, tokens] int64 on the session's device; at least one token.
        position_ids: [1, tokens] int64, or [axes, 1, tokens] if `fetch` returned positions.
        ring: ring that `attention` runs on. It is current only while the loop body runs; pass it explicitly if
            attention runs later.
        is_last: whether this is the rank's last micro-batch of the step.
        pack_labels: [tokens of the pack] int64 on the host for packs of joined sequences, else None.
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
        # Cleared when the backward of a loss from this micro-batch begins.
        ring.context.loss_missing = f"{ring.place}: {OTHER_LOSS if guards.sync.trains else NO_TRAINING}"
        self.pack_labels = shard.pack_labels
        self.loss_sum: Tensor | None = None
        self._guards = guards
        self._denominator = denominator
        self._losses = self._backwards = 0

    def loss(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the step's loss, to call backward on.

        The share is the sum of its token losses / `denominator`, times `loss_factor`.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return self.normalised(token_loss_sum(logits, self.labels))

    def loss_of(self, hidden: Tensor, head: nn.Linear | Tensor) -> Tensor:
        """Return the same loss as `loss`, computing the logits block by block instead of materializing all of them.

        Args:
            hidden: [1, tokens, width] inputs of the head, for `input_ids`.
            head: the model's linear output layer, or its weight [vocabulary, width].

        Raises:
            RunError: the head's weight is sharded: the call is outside the forward of a model wrapped by `fully_shard`.
        """
        assert self.ring.context.labels is not None
        return self.normalised(head_loss_sum(hidden, head, self.ring.context.labels))

    @property
    def loss_factor(self) -> float:
        """Return the factor on the loss that undoes the gradient averaging of FSDP2 and DeepSpeed."""
        return self._guards.sync.loss_factor

    @property
    def denominator(self) -> int | Tensor:
        """Return the loss denominator of the step: its number of tokens with labels, or of manifest rows."""
        return self._denominator

    def normalised(self, loss_sum: Tensor) -> Tensor:
        """Return this rank's share of the step's loss for a sum of token losses (0-d) computed by the script."""
        self.loss_sum = loss_sum.detach()
        loss = loss_sum * self._guards.sync.loss_factor / self._denominator
        # The checks run on the host and would break the graph.
        if not torch.compiler.is_compiling():
            self._guards.see_loss(self.ring.place, self.row, self.loss_sum, loss)
        if not self._guards.sync.trains:
            return without_backward(loss, self.ring.place)
        if loss.requires_grad:
            self._losses += 1
            # The first hook of the loss's backward: it must run before a layer checks `loss_missing`.
            loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return loss

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each label, [1, tokens]; 0 for tokens without a label.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return token_log_probs(logits, self.labels)

    def part_of(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return this rank's shard [1, tokens, ...] of per-token values, e.g. log-probabilities or advantages.

        Args:
            values: manifest row -> [length, ...], as returned by `Step.collect`.

        Raises:
            RunError: a sequence has no values, or their number differs from its number of tokens.
        """
        return part_of(values, self.row, self._layout, self.ring.index).to(self.input_ids.device)

    def _note_backward(self, _: Tensor) -> None:
        self._backwards += 1
        self.ring.context.loss_missing = ""

    def require_backward(self) -> None:
        """Raise RunError if a trainable loss was computed but its backward never ran."""
        if self._losses and not self._backwards:
            raise RunError(f"{self.ring.place}: {NO_BACKWARD}")
