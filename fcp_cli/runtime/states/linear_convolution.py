"""Short causal convolutions over a ring's shards, which precede the states of linear attention and state spaces.

A convolution of kernel size K needs the K - 1 rows before each run (consecutive tokens of a sequence on a member), from
any owner; at the start of a sequence they are zeros. They arrive by an `exchange`, whose backward returns their
gradients. Runs are then concatenated, each after its halo rows, so that one call of an unmodified kernel computes all
of them without mixing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.row_exchange import Route, exchange, route
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS, ShardLayout
from fcp_cli.runtime.recomputation.recompute import staged_attention
from fcp_cli.runtime.ring_attention.ring import Ring


class _Places(NamedTuple):
    """Index tensors of a `_Halo` on one device."""

    given: Tensor
    laid: Tensor
    kept: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Halo:
    """Rows that one member sends and receives, and the layout of the kernel's input.

    Attributes:
        route: route of the exchanged rows.
        given: [n] own rows that runs look back at, in the order of the route.
        laid: [m] rows of the kernel's input, as indices into the own rows, then received rows, then one row of zeros.
        kept: [own rows] positions of the own rows in the kernel's input.
        memo: the three as tensors, per device.
    """

    route: Route
    given: IntArray
    laid: IntArray
    kept: IntArray
    memo: dict[torch.device, _Places] = field(default_factory=dict, repr=False)

    def places(self, device: torch.device) -> _Places:
        if device not in self.memo:
            parts = (self.given, self.laid, self.kept)
            self.memo[device] = _Places(*(to_device(torch.from_numpy(part), device) for part in parts))
        return self.memo[device]


def short_convolution(convolve: Callable[[Tensor], Tensor], rows: Tensor, kernel_size: int, ring: Ring) -> Tensor:
    """Convolve the micro-batch's sequences, which are sharded over the ring's members.

    Collective over the ring's members, and so is its backward. Sequences are padded with zeros on the left.

    Args:
        convolve: causal convolution from [1, channels, n] to the same shape, for any n.
        rows: [1, channels, tokens], the local shard in the order of `ring.layout.index(ring.index)`. Rows beyond
            `ring.tokens` are padding, convolved as a separate sequence.
        kernel_size: kernel size of the convolution.
        ring: the micro-batch's ring.

    Returns:
        [1, channels, tokens]
    """
    return staged_attention(lambda: _compute(convolve, rows, kernel_size, ring))


def _compute(convolve: Callable[[Tensor], Tensor], rows: Tensor, kernel_size: int, ring: Ring) -> Tensor:
    batch, _, tokens = rows.shape
    begin_layer(ring, batch, tokens)
    halo = _halo_of(ring.layout, ring.index, ring.ranks, kernel_size - 1, tokens - ring.tokens)
    given, laid, kept = halo.places(rows.device)
    own = rows[0].transpose(0, 1)
    arrived = exchange(own.index_select(0, given), halo.route, ring.transport)
    parts = torch.cat((own, arrived, own.new_zeros(1, own.shape[1])))
    out = convolve(parts.index_select(0, laid).transpose(0, 1).unsqueeze(0))
    return out[0].transpose(0, 1).index_select(0, kept).transpose(0, 1).unsqueeze(0)


def begin_layer(ring: Ring, batch: int, tokens: int) -> None:
    """Count a forward of a stateful layer; raise RunError if its input does not fit the ring or the pack has masks."""
    if batch != 1 or tokens < ring.tokens:
        raise RunError(
            f"a layer that keeps a state was given a batch of {batch} with {tokens} tokens, but rank "
            f"{ring.ranks[ring.index]} holds {ring.tokens} tokens of this micro-batch: feed the model the "
            "micro-batch's own shard"
        )
    if ring.layout.masks:
        raise RunError(
            f"{ring.place}: the pack has masks, and linear attention and state spaces see exactly the tokens "
            "before a token; plan from a manifest without masks, or train a model without such layers"
        )
    ring.begin_forward(tokens)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _halo_of(layout: ShardLayout, index: int, ranks: tuple[int, ...], reach: int, padding: int) -> _Halo:
    """Return one member's halo of `reach` rows, computed from the layout alone, as on every member."""
    owners, places = _who_holds(layout)
    lengths = np.asarray(layout.lengths, dtype=np.int64)
    firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)  # first row of each row's sequence
    wanted = [_looked_back_at(layout.index(member), firsts, reach) for member in range(layout.degree)]
    consumers = np.repeat(np.arange(layout.degree), [(rows >= 0).sum() for rows in wanted])
    of_pack = np.concatenate([rows[rows >= 0] for rows in wanted]).astype(np.int64)
    producers = owners[of_pack]
    own, looked = layout.index(index), wanted[index]
    held, arriving = own.size + padding, int((looked >= 0).sum())
    before = np.full(looked.size, held + arriving)  # the row of zeros, after all others
    before[looked >= 0] = held + np.arange(arriving)
    starts = _starts(own, firsts)
    if padding:
        starts, before = np.append(starts, own.size), np.append(before, [held + arriving] * reach)
    laid, kept = _laid_out(starts, before.reshape(len(starts), reach), held)
    return _Halo(
        route=route(producers, consumers, ranks=ranks, index=index),
        given=places[of_pack[producers == index]],
        laid=laid,
        kept=kept,
    )


def _who_holds(layout: ShardLayout) -> tuple[IntArray, IntArray]:
    """Return the owner of each row of the pack, and the row's position in the owner's buffer."""
    owners, places = np.empty((2, sum(layout.lengths)), dtype=np.int64)
    for member in range(layout.degree):
        rows = layout.index(member)
        owners[rows], places[rows] = member, np.arange(rows.size)
    return owners, places


def _starts(rows: IntArray, firsts: IntArray) -> IntArray:
    """Return the starts of runs (consecutive rows of a sequence) among rows of the pack."""
    follows = (np.diff(rows) == 1) & (np.diff(firsts[rows]) == 0)
    return np.flatnonzero(np.concatenate((np.ones(min(1, rows.size), dtype=bool), ~follows)))


def _looked_back_at(rows: IntArray, firsts: IntArray, reach: int) -> IntArray:
    """Return the rows of the pack before each of a member's runs, [runs * reach]; -1 before the sequence's start."""
    heads = rows[_starts(rows, firsts)]
    before = heads[:, None] + np.arange(-reach, 0)
    return np.where(before >= firsts[heads][:, None], before, -1).ravel()


def _laid_out(starts: IntArray, before: IntArray, held: int) -> tuple[IntArray, IntArray]:
    """Concatenate runs, each after its halo rows.

    Args:
        starts: [runs] starts of runs among the own rows.
        before: [runs, reach] halo rows of each run.
        held: number of own rows.

    Returns:
        Indices of the concatenated rows, and the positions of the own rows among them.
    """
    runs, reach = before.shape
    # A row moves back by `reach` for its own run and for each run before it.
    kept = np.arange(held) + reach * np.searchsorted(starts, np.arange(held), side="right")
    laid = np.empty(held + before.size, dtype=np.int64)
    laid[kept] = np.arange(held)
    laid[(starts + reach * np.arange(runs))[:, None] + np.arange(reach)] = before
    return laid, kept
