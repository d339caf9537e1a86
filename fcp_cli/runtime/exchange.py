"""Move rows of a tensor from the ranks that computed them to the ranks that need them; gradients travel back.

It connects a vision encoder, whose images are balanced by work, and a language model, whose tokens are in zig-zag
shards. It depends on neither: producers and consumers may be the same ranks, other ranks, or a mix. Senders and rows
follow from a table that every rank computes itself, so sizes are never sent.

Messages use the rings' communicator, in rounds of the same order on all ranks (`GroupChannel.exchange`), so an exchange
cannot deadlock with itself or with the rings around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.runtime.kernels.base import lse_dtype, to_device
from fcp_cli.runtime.transport import GroupChannel, Transport, Waits, drive
from fcp_cli.util.arrays import IntArray


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


# Ulysses: exchange tokens for heads within the ranks of a Ulysses group, and back.
#
# The u ranks of a Ulysses group hold consecutive runs of tokens. For attention each rank gets all tokens of the group
# for its own u-th of the heads (Jacobs et al., "DeepSpeed Ulysses"). Keys and values of these heads then travel
# around the ring of ranks with the same heads in other groups (Fang and Zhao, "USP"; Gu et al., "LoongTrain"):
#
#                        tokens of the group T, those of its member a: t(a)
#     before, after      q, out [t(a), H, D]                 k, v [t(a), G, D]
#     between            q, out [T, H / u, D]                k, v [T, max(1, G / u), D]
#
# Heads of v and out may have a size other than D.
#
# Member a has query heads a H / u to (a + 1) H / u - 1 and the key/value heads that serve them. If u exceeds G, u / G
# neighbours have the same key/value head, whose gradients are summed by the owner of the tokens.
#
# A backward kernel only needs the product of an output row with its gradient. The row's owner, whose model keeps the
# output anyway, sends that number. The member that attended keeps no output, and passes its kernel a substitute with
# the same product.
#
# Messages use the rings' communicator, in the rounds of `GroupChannel.exchange`. Sizes follow from the layout, and
# messages are whole rows of a buffer, so they need no copy on arrival.


class UlyssesExchange:
    """One member's side of the head exchanges of its Ulysses group.

    Args:
        channel: messages between the members of the Ulysses group, in token order.
        tokens: number of tokens of each member.
    """

    __slots__ = ("_channel", "_place", "_rows", "_size", "_tokens")

    def __init__(self, channel: GroupChannel, tokens: Sequence[int]) -> None:
        self._channel, self._tokens = channel, tokens
        self._place, self._size = channel.index, len(channel.ranks)
        self._rows = [slice(*ends) for ends in pairwise(accumulate(tokens, initial=0))]

    def to_heads(self, kind: str, *tensors: Tensor) -> Waits[list[Tensor]]:
        """Exchange own tokens of all heads for the group's tokens of own heads; yield the handles to wait for.

        Args:
            kind: message name for records and errors.
            tensors: [own tokens, heads, any D] each, of one data type; u divides each number of heads or is a multiple
                of it.

        Returns:
            [tokens of the group, max(1, heads / u), D] each: views of one buffer, with the last dimension contiguous.
        """
        size, own = self._size, self._tokens[self._place]
        sizes = [tensor.shape[2] for tensor in tensors]
        # One message for all tensors: a row holds one member's heads of each tensor, side by side.
        columns = self._columns([tensor.shape[1] for tensor in tensors], sizes)
        sent = tensors[0].new_empty(size, own, columns[-1].stop)
        received = sent.new_empty(sum(self._tokens), columns[-1].stop)
        for tensor, column, head_dim in zip(tensors, columns, sizes, strict=True):
            _spread(tensor, _by_heads(sent[..., column], head_dim))
        received[self._rows[self._place]].copy_(sent[self._place])
        yield from self._channel.exchange(kind, lambda to: sent[to], lambda source: received[self._rows[source]])
        return [_by_heads(received[:, column], head_dim) for column, head_dim in zip(columns, sizes, strict=True)]

    def to_tokens(self, kind: str, *tensors: Tensor, heads: Sequence[int]) -> Waits[list[Tensor]]:
        """Reverse `to_heads`: return own tokens of all heads. Copies of a replicated head are summed.

        Args:
            kind: message name.
            tensors: [tokens of the group, max(1, heads / u), any D] each, of one data type.
            heads: total number of heads per tensor.

        Returns:
            [own tokens, heads, D] each.
        """
        size, own = self._size, self._tokens[self._place]
        sizes = [tensor.shape[2] for tensor in tensors]
        rows = [tensor.flatten(1) for tensor in tensors]
        sent = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, dim=1)
        # No name keeps the caller's tensors alive while the results are allocated.
        del tensors, rows
        received = sent.new_empty(size, own, sent.shape[1])
        received[self._place].copy_(sent[self._rows[self._place]])
        yield from self._channel.exchange(kind, lambda to: sent[self._rows[to]], lambda source: received[source])
        parts = zip(self._columns(heads, sizes), sizes, heads, strict=True)
        return [_gather(_by_heads(received[..., column], head_dim), count) for column, head_dim, count in parts]

    def _columns(self, heads: Sequence[int], sizes: Sequence[int]) -> list[slice]:
        """Return each tensor's columns in a row of a message, for one member's heads of the given sizes."""
        shares = (max(1, count // self._size) * size for count, size in zip(heads, sizes, strict=True))
        return [slice(*ends) for ends in pairwise(accumulate(shares, initial=0))]


class Swapped(torch.autograd.Function):
    """Differentiable head exchange: tokens for heads, or heads for tokens if given the total number of heads.

    to_heads = Swapped.apply(exchange, None, *tensors)
    (to_tokens,) = Swapped.apply(exchange, (heads,), tensor)
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: UlyssesExchange, heads: Sequence[int] | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.heads = exchange, [tensor.shape[1] for tensor in tensors] if heads is None else None
        return _swapped(exchange, heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_swapped(ctx.exchange, ctx.heads, grads)


def _swapped(exchange: UlyssesExchange, heads: Sequence[int] | None, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if heads is not None:
        return tuple(drive(exchange.to_tokens("tokens", *tensors, heads=heads)))
    return tuple(part.clone() for part in drive(exchange.to_heads("heads", *tensors)))  # parts are views of one buffer


def row_products(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return the row-wise dot products [T, H, 1] of two tensors [T, H, D], in the precision of kernels."""
    wide = lse_dtype(out.dtype)
    return (grad_out.to(wide) * out).sum(-1, keepdim=True)


def of_products(delta: Tensor, grad_out: Tensor) -> Tensor:
    """Return rows [T, H, D] whose dot products with `grad_out` are `delta` [T, H, 1]; zero where `grad_out` is zero."""
    length = row_products(grad_out, grad_out)
    factor = torch.where(length > 0, delta / length, 0.0)
    return (factor * grad_out).to(grad_out.dtype)


def _by_heads(rows: Tensor, head_dim: int) -> Tensor:
    """View [.., heads * D] as [.., heads, D]; never a copy, unlike `Tensor.view` as patched by MindSpeed."""
    return torch.unflatten(rows, -1, (-1, head_dim))


def _spread(tensor: Tensor, parts: Tensor) -> None:
    """Write [T, heads, D] to [u, T, max(1, heads / u), D]: the heads of each member, replicated if u exceeds heads."""
    size, (tokens, heads, head_dim) = parts.shape[0], tensor.shape
    if heads >= size:
        parts.copy_(tensor.view(tokens, size, heads // size, head_dim).transpose(0, 1))
    else:
        replicated = torch.unflatten(parts, 0, (heads, size // heads))
        replicated.copy_(tensor.transpose(0, 1).reshape(heads, 1, tokens, 1, head_dim))


def _gather(parts: Tensor, heads: int) -> Tensor:
    """Return [T, heads, D] from the heads of each member, [u, T, max(1, heads / u), D]; replicas are summed."""
    size, tokens, _, head_dim = parts.shape
    # A new tensor, since other results are views of the received one.
    gathered = parts.new_empty(tokens, heads, head_dim)
    if heads >= size:
        gathered.view(tokens, size, heads // size, head_dim).copy_(parts.transpose(0, 1))
    else:
        replicated = parts.view(heads, size // heads, tokens, head_dim)
        gathered.copy_(replicated.sum(1, dtype=lse_dtype(parts.dtype)).transpose(0, 1))
    return gathered
