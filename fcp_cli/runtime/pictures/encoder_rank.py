"""Dedicated encoder rank: sends a wave's embeddings, and encodes the next wave while others run the language model.

Messages are in the same order as on every other rank, so no cycle of waits can form: embeddings of a wave, its
gradients, embeddings of the next. In between the rank computes: first the next wave's forward, which the others wait
for, then the backward of the previous wave, whose gradients have arrived.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.row_exchange import exchange
from fcp_cli.runtime.communication.transport import Transport
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.pictures.visuals import VisualShard

Encode = Callable[[VisualShard | None], Tensor]


class EncoderAhead:
    """Encoder of one step on a dedicated encoder rank.

    Args:
        visuals: images of the step's micro-batches, on the device, in order; None for a wave without images.
    """

    def __init__(self, visuals: list[VisualShard | None]) -> None:
        self._visuals = visuals
        self._next = 0
        self._ready: Tensor | None = None
        self._sent: tuple[Tensor, Tensor] | None = None  # embeddings, and the leaf that gets their gradient

    def bring(self, encode: Encode, transport: Transport | None) -> Tensor:
        """Send the embeddings of the next micro-batch [its parts' tokens, ...], and encode those of the one after it.

        Returns:
            An empty tensor, through whose graph the embeddings' gradients arrive.
        """
        number, self._next = self._next, self._next + 1
        own = encode(self._visuals[number]) if self._ready is None else self._ready
        visuals = self._visuals[number]
        leaf = own.detach().requires_grad_(own.requires_grad)
        arrived = leaf[:0] if visuals is None else exchange(leaf, visuals.route, transport)
        is_last = self._next == len(self._visuals)
        self._ready = None if is_last else encode(self._visuals[self._next])
        self.run_backward()
        self._sent = (own, leaf) if own.requires_grad else None
        return arrived

    def run_backward(self) -> None:
        """Run the encoder's backward of the last sent embeddings, if it is trained and their gradients have arrived."""
        if self._sent is not None:
            own, leaf = self._sent
            torch.autograd.backward(own, torch.zeros_like(own) if leaf.grad is None else leaf.grad)
            self._sent = None


def require_ranks_apart(sync: GradientSync, encoder_ranks: int | None) -> None:
    """Raise RunError if the plan has encoder ranks but the model wrapper needs all ranks to run in step."""
    if encoder_ranks and not sync.lets_ranks_run_apart:
        raise RunError(
            "under a plan with encoder ranks these run ahead of the others, which DistributedDataParallel, FSDP2 and "
            "DeepSpeed do not allow; give session.steps the plain model (fcp launch --zero 0 or 1), or plan without "
            "--encoder-ranks"
        )
