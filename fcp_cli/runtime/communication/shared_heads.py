"""Exchange tokens for heads among the ranks of a group that share the heads, and back.

u ranks of a group, a *set*, hold runs of tokens that lie one behind the other. For attention each of them gets the
tokens of the whole set for its own u-th part of the heads (Jacobs et al., "DeepSpeed Ulysses"); keys and values of that
part then travel around the ring of those with the same part in other sets (Fang and Zhao, "USP"; Gu et al.,
"LoongTrain"):

                       tokens of the set T, those of its member a: t(a)
    before, after      q, out [t(a), H, D]                 k, v [t(a), G, D]
    between            q, out [T, H / u, D]                k, v [T, max(1, G / u), D]

Heads of values, and with them those of out, may have another size than D.

Member a has query heads a H / u to (a + 1) H / u - 1 and the key/value heads that serve them. If u exceeds G, u / G
neighbours have the same key/value head, and its gradients are summed by the member whose tokens they are.

A backward kernel needs of a row's output only its product with the output's gradient. The row's owner, where the model
keeps the output, sends that number; the member that attended keeps no output, and gives its kernel one with the same
product.

Messages go over the rings' communicator, in the rounds of `GroupChannel.exchange`. Sizes follow from the layout, and
messages are whole rows of a buffer, so that they arrive in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcp_cli.runtime.communication.transport import GroupChannel, Waits, drive
from fcp_cli.runtime.kernels.base import lse_dtype


class UlyssesExchange:
    """One member's part in the exchanges of its set.

    Args:
        channel: messages between the members of the set, in the order of their tokens.
        tokens: the tokens of each of them.
    """

    __slots__ = ("_channel", "_place", "_rows", "_size", "_tokens")

    def __init__(self, channel: GroupChannel, tokens: Sequence[int]) -> None:
        self._channel, self._tokens = channel, tokens
        self._place, self._size = channel.index, len(channel.ranks)
        self._rows = [slice(*ends) for ends in pairwise(accumulate(tokens, initial=0))]

    def to_heads(self, kind: str, *tensors: Tensor) -> Waits[list[Tensor]]:
        """Give the set's tokens for this member's heads in return for its own tokens; yield the handles it waits for.

        Args:
            kind: name of the messages, for records and errors.
            tensors: [own tokens, heads, any D] each, of one type; u divides the heads of each, or these divide u.

        Returns:
            [tokens of the set, max(1, heads / u), D] each: views of one buffer, the last dimension contiguous.
        """
        size, own = self._size, self._tokens[self._place]
        sizes = [tensor.shape[2] for tensor in tensors]
        # One message for all: a row holds the heads of one member of each tensor, side by side.
        columns = self._columns([tensor.shape[1] for tensor in tensors], sizes)
        sent = tensors[0].new_empty(size, own, columns[-1].stop)
        received = sent.new_empty(sum(self._tokens), columns[-1].stop)
        for tensor, column, head_dim in zip(tensors, columns, sizes, strict=True):
            _spread(tensor, _by_heads(sent[..., column], head_dim))
        received[self._rows[self._place]].copy_(sent[self._place])
        yield from self._channel.exchange(kind, lambda to: sent[to], lambda source: received[self._rows[source]])
        return [_by_heads(received[:, column], head_dim) for column, head_dim in zip(columns, sizes, strict=True)]

    def to_tokens(self, kind: str, *tensors: Tensor, heads: Sequence[int]) -> Waits[list[Tensor]]:
        """Undo `to_heads`: exchange the set's tokens for all heads of the own ones. Replicas' shares are summed.

        Args:
            kind: name of the messages.
            tensors: [tokens of the set, max(1, heads / u), any D] each, of one type.
            heads: the heads of all members together, per tensor.

        Returns:
            [own tokens, heads, D] each.
        """
        size, own = self._size, self._tokens[self._place]
        sizes = [tensor.shape[2] for tensor in tensors]
        rows = [tensor.flatten(1) for tensor in tensors]
        sent = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, dim=1)
        # Nothing here holds the caller's tensors while the results are allocated.
        del tensors, rows
        received = sent.new_empty(size, own, sent.shape[1])
        received[self._place].copy_(sent[self._rows[self._place]])
        yield from self._channel.exchange(kind, lambda to: sent[self._rows[to]], lambda source: received[source])
        parts = zip(self._columns(heads, sizes), sizes, heads, strict=True)
        return [_gather(_by_heads(received[..., column], head_dim), count) for column, head_dim, count in parts]

    def _columns(self, heads: Sequence[int], sizes: Sequence[int]) -> list[slice]:
        """Return the offsets of each tensor's heads of one member, of these sizes, in a row of a message."""
        shares = (max(1, count // self._size) * size for count, size in zip(heads, sizes, strict=True))
        return [slice(*ends) for ends in pairwise(accumulate(shares, initial=0))]


class Swapped(torch.autograd.Function):
    """Tokens of a set exchanged for heads, with the gradients' way back; given `heads`, of all members, the reverse.

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
    return tuple(part.clone() for part in drive(exchange.to_heads("heads", *tensors)))  # which are views of one buffer


def row_products(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return [T, H, 1] the products of two tensors' rows [T, H, D], summed over D as kernels sum them."""
    wide = lse_dtype(out.dtype)
    return (grad_out.to(wide) * out).sum(-1, keepdim=True)


def of_products(delta: Tensor, grad_out: Tensor) -> Tensor:
    """Return [T, H, D] rows whose products with those of `grad_out` are `delta` [T, H, 1]; zero rows stay zero."""
    length = row_products(grad_out, grad_out)
    factor = torch.where(length > 0, delta / length, 0.0)
    return (factor * grad_out).to(grad_out.dtype)


def _by_heads(rows: Tensor, head_dim: int) -> Tensor:
    """View [.., heads * D] as [.., heads, D], never as a copy, which MindSpeed's `Tensor.view` may give."""
    return torch.unflatten(rows, -1, (-1, head_dim))


def _spread(tensor: Tensor, parts: Tensor) -> None:
    """Write [T, heads, D] to [u, T, max(1, heads / u), D], the heads of each member."""
    size, (tokens, heads, head_dim) = parts.shape[0], tensor.shape
    if heads >= size:
        parts.copy_(tensor.view(tokens, size, heads // size, head_dim).transpose(0, 1))
    else:
        replicated = torch.unflatten(parts, 0, (heads, size // heads))
        replicated.copy_(tensor.transpose(0, 1).reshape(heads, 1, tokens, 1, head_dim))


def _gather(parts: Tensor, heads: int) -> Tensor:
    """Return [T, heads, D] of [u, T, max(1, heads / u), D], the heads of each member; replicas are summed."""
    size, tokens, _, head_dim = parts.shape
    # Never a view of the received tensor, which others are views of.
    gathered = parts.new_empty(tokens, heads, head_dim)
    if heads >= size:
        gathered.view(tokens, size, heads // size, head_dim).copy_(parts.transpose(0, 1))
    else:
        replicated = parts.view(heads, size // heads, tokens, head_dim)
        gathered.copy_(replicated.sum(1, dtype=lse_dtype(parts.dtype)).transpose(0, 1))
    return gathered
