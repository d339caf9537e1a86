"""Move rows of a tensor from the ranks that computed them to the ranks that need them; gradients travel back.

It connects a vision encoder, whose images are balanced by work, and a language model, whose tokens are in zig-zag
shards. It depends on neither: producers and consumers may be the same ranks, other ranks, or a mix. Senders and rows
follow from a table that every rank computes itself, so sizes are never sent.

Messages use the rings' communicator, in rounds of the same order on all ranks (`GroupChannel.exchange`), so an exchange
cannot deadlock with itself or with the rings around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.arrays import IntArray
from fcp_cli.runtime.communication.transport import GroupChannel, Transport, Waits, drive
from fcp_cli.runtime.kernels.base import to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Route:
    """One rank's part of an exchange. Create it with `route`.

    Attributes:
        ranks: global ranks of all participants.
        index: this rank's index in `ranks`.
        sends: per participant, the rows of this rank's input to send there, in order.
        receives: per participant, the rows of this rank's output that arrive from there, in order.
    """

    ranks: tuple[int, ...]
    index: int
    sends: tuple[IntArray, ...]
    receives: tuple[IntArray, ...]

    @property
    def num_outputs(self) -> int:
        """Return the number of rows this rank receives."""
        return sum(map(len, self.receives))


def route(producers: IntArray, consumers: IntArray, *, ranks: tuple[int, ...], index: int) -> Route:
    """Return one rank's route.

    Args:
        producers: [rows] index in `ranks` of each row's producer, whose input holds its rows in this order.
        consumers: [rows] index in `ranks` of each row's consumer, or -1; a consumer's output holds its rows in this
            order.
        ranks: global ranks of all participants; the same on all of them.
        index: this rank's index in `ranks`.
    """
    produced, consumed = (np.flatnonzero(places == index) for places in (producers, consumers))
    places = range(len(ranks))
    return Route(
        ranks=ranks,
        index=index,
        sends=tuple(np.flatnonzero(consumers[produced] == place) for place in places),
        receives=tuple(np.flatnonzero(producers[consumed] == place) for place in places),
    )


def exchange(rows: Tensor, route: Route, transport: Transport | None) -> Tensor:
    """Send rows and return those that this rank needs. Collective over the route's ranks, and so is its backward.

    Args:
        rows: [at least as many as this rank produces, ...]; surplus rows get zero gradient, so a rank that produces
            nothing can pass a dummy row to keep its own computation in the graph.
        route: this rank's route, kept for backward, when another may be current.
        transport: transport of the messages; may be None for a single participant.

    Returns:
        [route.num_outputs, ...]
    """
    assert len(route.ranks) == 1 or transport is not None, "an exchange between ranks needs a transport"
    out: Tensor = _Exchange.apply(rows, route, transport)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, transport: Transport | None) -> Tensor:
        ctx.route, ctx.transport, ctx.num_inputs = route, transport, rows.shape[0]
        return drive(move_rows("rows", rows, route, transport, num_outputs=route.num_outputs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        back = Route(ranks=ctx.route.ranks, index=ctx.route.index, sends=ctx.route.receives, receives=ctx.route.sends)
        return drive(move_rows("drows", grad, back, ctx.transport, num_outputs=ctx.num_inputs)), None, None


def move_rows(kind: str, rows: Tensor, route: Route, transport: Transport | None, *, num_outputs: int) -> Waits[Tensor]:
    """Run one direction of an exchange; yield the handles to wait for.

    Args:
        kind: message name for records and errors.
        rows: [inputs, ...]
        route: this rank's route.
        transport: transport of the messages.
        num_outputs: number of rows of the result; rows that no rank sends are zero.
    """
    out = rows.new_zeros(num_outputs, *rows.shape[1:])
    sends, receives = (
        [to_device(torch.from_numpy(part), rows.device) for part in parts] for parts in (route.sends, route.receives)
    )
    out[receives[route.index]] = rows[sends[route.index]]
    arrived = [rows.new_empty(len(places), *rows.shape[1:]) for places in route.receives]
    channel = GroupChannel(route.ranks, route.index, transport)
    yield from channel.exchange(kind, lambda to: rows[sends[to]], arrived.__getitem__)
    for source, part in enumerate(arrived):
        if source != route.index:
            out[receives[source]] = part
    return out
