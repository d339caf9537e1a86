"""Context of a micro-batch: labels, images, caches and checks of its forward and backward.

A session fills it in, and layers read it at `ring.context`. A ring created without a session has an empty one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fcp_cli.errors import RunError

if TYPE_CHECKING:
    from fcp_cli.runtime.loss.token_loss import Labels
    from fcp_cli.runtime.pictures.encoder_rank import EncoderAhead
    from fcp_cli.runtime.pictures.visuals import VisualShard


@dataclass(kw_only=True, slots=True, eq=False)
class MicroBatchContext:
    """Context of one micro-batch on one rank.

    Attributes:
        place: step, micro-batch and rank, for messages; "" outside a step.
        labels: labels of this member's tokens, for a model that computes its own loss, or None.
        visuals: this member's part of the pack's images and videos, or None.
        encoder_ahead: encoder runs of a dedicated encoder rank, or None on other ranks.
        encoder_calls: number of vision encoder runs so far.
        model_tokens: number of tokens the model must be called with, padding included, or None for any number.
        forward_calls: number of forwards of token-mixing layers so far, without recomputed ones.
        backward_calls: number of their backwards so far.
        most_forwards, most_backwards: maximum of these counts in an earlier micro-batch; 0 allows any number.
        backward_forbidden: reason why a backward would deadlock now, or "".
        loss_missing: reason why no backward may run before that of the micro-batch's own loss, or "".
        begin_pass: compares the kind and number of a pass with those of the other ranks, or None.
    """

    place: str = ""
    labels: Labels | None = None
    visuals: VisualShard | None = None
    encoder_ahead: EncoderAhead | None = None
    encoder_calls: int = 0
    model_tokens: int | None = None
    forward_calls: int = 0
    backward_calls: int = 0
    most_forwards: int = 0
    most_backwards: int = 0
    backward_forbidden: str = ""
    loss_missing: str = ""
    begin_pass: Callable[[str, int], None] | None = None

    def begin_forward(self, tokens: int, *, degree: int, attention_calls: int) -> None:
        """Count a forward of a token-mixing layer; raise RunError if it must not run."""
        if self.backward_forbidden:  # a recomputation, which would otherwise fail with hops in flight
            raise RunError(self.backward_forbidden)
        if torch._C._current_graph_task_id() == -1:  # -1 outside backward: not a recomputation
            self.forward_calls += 1
            self._require_expected(self.forward_calls, self.most_forwards, "forward", degree)
        elif self.begin_pass is not None:
            self.begin_pass("recomputed forward", attention_calls)
        if self.model_tokens not in (None, tokens):
            raise RunError(
                f"{self.place}: the model was called with {tokens} tokens, but its shard of the micro-batch has "
                f"{self.model_tokens}: give it the micro-batch's own, and evaluate or generate in 'with fcp.outside():'"
            )

    def begin_backward(self, *, degree: int) -> None:
        """Count a backward of a token-mixing layer; raise RunError if it must not run."""
        if self.backward_forbidden or self.loss_missing:
            raise RunError(self.backward_forbidden or self.loss_missing)
        self.backward_calls += 1
        self._require_expected(self.backward_calls, self.most_backwards, "backward", degree)

    def _require_expected(self, calls: int, most: int, kind: str, degree: int) -> None:
        # One pass more than in earlier micro-batches: the other members may not run it, and this one would hang.
        if most and calls > most and degree > 1:
            raise RunError(
                f"{self.place}: the {kind} of attention runs more often than in the micro-batches before ({most} "
                "times), and the other ranks of its ring may not run it: run the model equally often in each "
                "micro-batch on every rank, and passes that only some ranks need in 'with fcp.outside():'"
            )
        if self.begin_pass is not None:
            self.begin_pass(kind, calls)
