"""Move rows of a tensor from the ranks that computed them to the ranks that need them; gradients travel back.

It connects a vision encoder, whose images are shared out by work, and a language model, whose tokens lie in zig-zag
shards. It depends on neither: producers and consumers may be the same ranks, other ranks, or some of both. Senders and
rows follow from one table that every rank computes by itself, so sizes are never sent.

Messages go over the rings' communicator, in rounds that are in the same order on all ranks
(`GroupChannel.exchange`), so the exchange cannot deadlock with itself or with the rings around it.
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
    """One rank's part of an exchange. Make it with `route`.

    Attributes:
        ranks: global ranks of all that take part.
        index: this rank's place among them.
        sends: per place, the rows of this rank's input that go there, in order.
        receives: per place, the rows of this rank's output that come from there, in order.
    """

    ranks: tuple[int, ...]
    index: int
    sends: tuple[IntArray, ...]
    receives: tuple[IntArray, ...]

    @property
    def num_outputs(self) -> int:
        """Return how many rows this rank gets."""
        return sum(map(len, self.receives))


def route(producers: IntArray, consumers: IntArray, *, ranks: tuple[int, ...], index: int) -> Route:
    """Work out one rank's part.

    Args:
        producers: [rows] place in `ranks` of who computes each row; a producer's input holds its rows in this order.
        consumers: [rows] place of who needs each row, -1 if none does; a consumer's output holds
            its rows in this order.
        ranks: global ranks of all that take part; the same on all of them.
        index: this rank's place among them.
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
    """Hand rows over and get those that this rank needs. Collective over the route's ranks, and so is its backward.

    Args:
        rows: [at least as many as this rank produces, ...]; rows that no rank needs get zero gradient, so that one
            that produces nothing may pass a dummy row to keep its own computation in the graph.
        route: this rank's part; bound to the call, since another may be current by the time of the backward.
        transport: carries the messages; None is enough if a single rank takes part.

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
    """Run one direction of an exchange; yield the handles it waits for.

    Args:
        kind: name of the messages, for records and errors.
        rows: [inputs, ...]
        route: this rank's part.
        transport: carries the messages.
        num_outputs: rows of the result; those that no rank sends stay zero.
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
