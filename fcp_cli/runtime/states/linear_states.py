"""Pass the states of recurrent layers along the chunks of a ring's sequences, in token order.

A chunk's update of a head's state S [Dk, Dv] is affine: its final state is A S + B, with A [Dk, Dk] the product of its
tokens' transitions (a scalar for state spaces) and B its final state from an empty one. The initial state of chunk j of
2d is the final state of chunk j - 1. Of d members, member r holds chunks r and 2d - 1 - r, so the state travels up the
ring and back down:

    member           0       1      ...    d - 1
    chunks up        0   ->  1  ->  ...  -> d - 1
    chunks down    2d-1  <- 2d-2 <- ...  <-   d        chunks d - 1 and d are on the same member

Gradients travel the same way with A transposed: the gradient of a chunk's initial state is A^T times that of its final
state. Each member sends at most two states a pass, at any degree; an all-gather of all A and B would send 4 (d - 1)
times as much. To hide the latency of 2 (d - 1) sequential messages, a state is cut into pieces, and a member forwards
one while it receives the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.runtime.communication.transport import Waits, drive
from fcp_cli.runtime.ring_attention.ring import Ring

PIECE_BYTES = 1 << 19
"""Most bytes of a message, unless a head's state is larger: its transfer takes about as long as its latency."""


def states_at_chunks(member: Ring, transitions: Tensor, updates: Tensor) -> Tensor:
    """Return the initial state of each chunk of a member. Collective over the members, and so is its backward.

    Args:
        member: this member's view of the ring.
        transitions: A of the front and back of each sequence: [2, sequences, H, Dk, Dk], or [2, sequences, H, 1, 1]
            scalars.
        updates: B, [2, sequences, H, Dk, Dv].

    Returns:
        [2, sequences, H, Dk, Dv]
    """
    states: Tensor = _States.apply(transitions, updates, member)  # type: ignore[no-untyped-call]
    return states


class _States(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transitions: Tensor, updates: Tensor, member: Ring) -> Tensor:
        states = drive(carry(member, "state", transitions, updates))
        ctx.member = member
        ctx.save_for_backward(transitions.contiguous(), states)  # a view would keep its whole base alive
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transitions, states = ctx.saved_tensors
        # Gradients go the opposite way, on which fronts and backs swap places.
        left = drive(carry(ctx.member, "dstate", transitions.flip(0).mT, grad.flip(0))).flip(0)
        is_number = transitions.shape[-1] == 1
        of_transitions = (left * states).sum((-2, -1), keepdim=True) if is_number else left @ states.mT
        return of_transitions, left, None


def carry(member: Ring, kind: str, transitions: Tensor, updates: Tensor) -> Waits[Tensor]:
    """Pass states up the ring through each member's first chunks, then down through its second; yield the handles.

    Args:
        member: the member's view of the ring.
        kind: message name for records.
        transitions: [2, sequences, H, Dk, Dk], or [2, sequences, H, 1, 1]
        updates: [2, sequences, H, Dk, Dv]

    Returns:
        Incoming state of each chunk, [2, sequences, H, Dk, Dv]; zeros for the first chunk of a sequence.
    """
    arriving = torch.zeros_like(updates, memory_format=torch.contiguous_format)
    flat = arriving.flatten(1, 2)
    before, after = member.index - 1, member.index + 1
    is_first, is_last = before < 0, after == member.degree

    def outgoing(part: int) -> Callable[[slice], Tensor]:
        """Return a function that computes a slice of the outgoing state of the member's first or second chunks."""
        times, plus = transitions[part].flatten(0, 1), updates[part].flatten(0, 1)
        if times.shape[-1] == 1:
            return lambda piece: torch.addcmul(plus[piece], times[piece], flat[part, piece])
        return lambda piece: torch.baddbmm(plus[piece], times[piece], flat[part, piece])

    pieces = _pieces(flat[0])
    up, down = (None if is_first else flat[0]), (None if is_last else flat[1])
    yield from _relay(member, kind, pieces, _Direction(up, before, outgoing(0), None if is_last else after))
    if is_last:
        # Chunks d - 1 and d are both on the last member: the state needs no message.
        flat[1].copy_(outgoing(0)(slice(None)))
    yield from _relay(member, kind, pieces, _Direction(down, after, outgoing(1), None if is_first else before))
    return arriving


@dataclass(frozen=True, slots=True)
class _Direction:
    """One of the two directions in which states pass through a member.

    Attributes:
        arriving: [sequences * H, Dk, Dv] buffer for the states from member `source`, or None if none arrive.
        source: index of the sending member.
        outgoing: returns a slice of the outgoing state.
        to: index of the receiving member, or None if there is none.
    """

    arriving: Tensor | None
    source: int
    outgoing: Callable[[slice], Tensor]
    to: int | None


def _relay(member: Ring, kind: str, pieces: list[slice], direction: _Direction) -> Waits[None]:
    """Receive slices, and forward each after its update while the next one arrives."""
    # At an end of the ring nothing is sent, but `start` needs an index: use the member's own.
    to = member.index if direction.to is None else direction.to
    sent = None
    # One extra iteration, since each sends the slice that the previous one computed.
    for piece in (*pieces, None):
        receive = None if piece is None or direction.arriving is None else direction.arriving[piece]
        if (handle := member.channel.start(kind, sent, to, receive, direction.source)) is not None:
            yield handle
        sent = None if piece is None or direction.to is None else direction.outgoing(piece)


def _pieces(states: Tensor) -> list[slice]:
    """Cut [heads, Dk, Dv] into runs of heads, the same on all members."""
    heads, each = len(states), states[0].numel() * states.element_size()
    width = max(1, PIECE_BYTES // each)
    return [slice(start, min(start + width, heads)) for start in range(0, heads, width)]
