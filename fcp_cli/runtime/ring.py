"""Ring of a micro-batch as seen by one of its members, and the current ring of a call to attention."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.exchange import UlyssesExchange
from fcp_cli.runtime.layout import RingMember, ShardLayout
from fcp_cli.runtime.transport import BufferPool, GroupChannel, Transport, Waits

if TYPE_CHECKING:
    from fcp_cli.runtime.loss import Labels
    from fcp_cli.runtime.visuals import EncoderAhead, VisualShard


class AttentionSpec(NamedTuple):
    """Settings of a layer's attention, the same on all members of a group.

    Attributes:
        scale: factor on the scores.
        window: tokens that a token attends to, itself included, or None for all before it.
        softcap: maps scores s to softcap * tanh(s / softcap), before sinks; None disables it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class SavedForBackward(NamedTuple):
    """Tensors that one call of attention saves for backward, with the tokens and heads it attended with.

    Attributes:
        q: [T, H, D]
        k, v: [T', G, D] and [T', G, Dv] of the member that comes first in backward: the previous one in a ring, the
            member itself at degree 1 and with a halo exchange.
        out: [T, H, Dv] of the member's own tokens and all heads, which the model keeps in any case.
        lse: [T, H]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


# A compiled graph carries tensors only, so a number identifies its ring. Weak, so that a ring ends with its
# micro-batch.
_handles = count()
_rings: WeakValueDictionary[int, Ring] = WeakValueDictionary()


class Ring(RingMember):
    """Ring of one micro-batch, as seen by one of its members.

    Attributes:
        transport: messages between ranks; may be None for degree 1.
        grad_dtype: data type in which gradients of keys and values are sent; see `GradRingDtype`.
        context: labels, images and checks of the micro-batch.
        handle: 0-d int64 that identifies the ring in compiled graphs.
    """

    __slots__ = ("__weakref__", "_head_group", "context", "grad_dtype", "handle", "transport")

    def __init__(
        self,
        layout: ShardLayout,
        index: int = 0,
        ranks: tuple[int, ...] = (0,),
        transport: Transport | None = None,
        grad_dtype: GradRingDtype = "fp32",
        context: MicroBatchContext | None = None,
    ) -> None:
        super().__init__(layout, index, ranks)
        assert len(ranks) == 1 or transport is not None, "a group of several members needs a transport"
        self.transport = transport
        self.grad_dtype = grad_dtype
        self.context = MicroBatchContext() if context is None else context
        self._head_group: Ring | None = None
        number = next(_handles)
        _rings[number] = self
        # On the CPU, so that reading the number synchronizes with no device.
        self.handle = torch.tensor(number, device="cpu")

    @property
    def place(self) -> str:
        """Return the step, micro-batch and rank, for messages."""
        return self.context.place

    @property
    def channel(self) -> GroupChannel:
        """Return the message channel between the members of the group."""
        return GroupChannel(self.ranks, self.index, self.transport)

    def ring_of_head_group(self) -> Ring:
        """Return this member's view of the ring that attends with its heads; created once."""
        if self._head_group is None:
            shared = self.ulysses_degree
            # The members of a Ulysses group are consecutive, so every `shared`-th member has the same heads.
            ranks = self.ranks[self.index % shared :: shared]
            index = self.index // shared
            self._head_group = Ring(self.layout.ring, index, ranks, self.transport, self.grad_dtype, self.context)
        return self._head_group

    def own_heads(self, of_all: Tensor) -> Tensor:
        """Return the slice of [H] with this member's heads, as a view."""
        share = of_all.shape[0] // self.ulysses_degree
        return of_all.narrow(0, self.index % self.ulysses_degree * share, share)

    def head_exchange(self) -> UlyssesExchange:
        """Return this member's side of the head exchange with its Ulysses group."""
        place = self.index % self.ulysses_degree
        members = range(self.index - place, self.index - place + self.ulysses_degree)
        ranks = self.ranks[members.start : members.stop]
        tokens = [self.layout.tokens(member) for member in members]
        return UlyssesExchange(GroupChannel(ranks, place, self.transport), tokens)

    def summed(self, own: Tensor) -> Waits[Tensor]:
        """Return the all-reduced sum of a small tensor; yield the handles to wait for. Collective.

        Reduces over the Ulysses group, then over the ring, so it only uses connections that attention uses. A member
        sends at most d - 1 times the tensor's bytes.

        Args:
            own: this member's tensor, of the same size on all members.
        """
        shared, place = self.ulysses_degree, self.index % self.ulysses_degree
        ranks = self.ranks[self.index - place : self.index - place + shared]
        own = yield from _summed(GroupChannel(ranks, place, self.transport), own)
        ring = self.ring_of_head_group() if shared > 1 else self
        return (yield from _summed(ring.channel, own))

    def begin_forward(self, tokens: int) -> None:
        """Count a forward of a token-mixing layer; raise RunError if it must not run."""
        self.context.begin_forward(tokens, degree=self.degree, attention_calls=self.attention_calls)

    def begin_backward(self) -> None:
        """Count a backward of a token-mixing layer; raise RunError if it must not run."""
        self.context.begin_backward(degree=self.degree)

    def check_call(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, sinks: Tensor | None = None
    ) -> None:
        """Count a call of attention; raise RunError if its tensors or settings do not fit the ring."""
        if window is not None and window < 1:
            raise RunError(f"attention was given window={window}; a token attends to itself at least, so 1 or more")
        if window is not None and not all(mask.has_windows for mask in self.layout.masks):
            raise RunError(
                f"{self.place}: attention in windows of {window} tokens is for sequences in the order of their tokens, "
                "but some of the micro-batch have masks of chunk pairs; train them with a model without windows"
            )
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise RunError(
                f"sinks of shape {tuple(sinks.shape)} do not fit the {q.shape[1]} query heads: give one for each"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise RunError(f"q, k and v have different types: {q.dtype}, {k.dtype}, {v.dtype}")
        self.check_shapes(q, k, v)
        self.begin_forward(q.shape[2])
        self.attention_calls += 1


def _summed(channel: GroupChannel, own: Tensor) -> Waits[Tensor]:
    if len(channel.ranks) == 1:
        return own
    return torch.sum((yield from channel.gather("sums", own)), dim=0)  # same order on all members: bitwise equal


current_ring: ContextVar[Ring | None] = ContextVar("current_ring", default=None)
"""The ring of the micro-batch whose forward is running; set by the session around it."""

runs_outside: ContextVar[bool] = ContextVar("runs_outside", default=False)
"""Whether attention without a ring attends over the whole batch that it is given; set by `outside.outside`."""


def implicit_ring() -> Ring:
    """Return the ring of the current micro-batch; raise RunError outside a forward."""
    # Recomputed forwards run inside backward. In a pipeline another micro-batch may be current by then, and attention
    # on its ring would silently give wrong results.
    if torch._C._current_graph_task_id() != -1:
        raise RunError(
            "attention was called inside backward (activation recomputation) without its ring: another micro-batch "
            "may be current by now, so pass ring=microbatch.ring to the attention call"
        )
    ring = current_ring.get()
    if ring is None:
        raise RunError(
            "attention was called outside a micro-batch: pass ring=microbatch.ring, call the model in the loop over a "
            "step, or, to evaluate or generate, in 'with fcp.outside():'"
        )
    return ring


def ring_of_handle(number: int) -> Ring:
    """Return the ring of a handle in a compiled graph."""
    ring = _rings.get(number)
    if ring is None:
        raise RunError("backward of a compiled model ran after its step had ended, and its ring with it")
    return ring


# Context of a micro-batch: labels, images, caches and checks of its forward and backward.
#
# A session fills it in, and layers read it at `ring.context`. A ring created without a session has an empty one.


@dataclass(kw_only=True, slots=True, eq=False)
class MicroBatchContext:
    """Context of one micro-batch on one rank.

    Attributes:
        place: step, micro-batch and rank, for messages; "" outside a step.
        labels: labels of this member's tokens, for a model that computes its own loss, or None.
        visuals: this member's part of the pack's images and videos, or None.
        buffers: memory of ring messages, shared with the rank's other micro-batches.
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
    buffers: BufferPool = field(default_factory=BufferPool)
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
