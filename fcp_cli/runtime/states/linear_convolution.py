"""Short causal convolutions over a ring's shards, which precede the states of linear attention and state spaces.

A convolution of kernel K needs K - 1 rows before each run of consecutive tokens: rows of the same sequence, on
whichever member has them; zeros if it has fewer. They arrive by an `exchange`, whose backward sends the gradients the
other way. Runs are then concatenated, each after the rows before it, so that one call of an unmodified kernel computes
all of them and none sees another.
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
from fcp_cli.runtime.recomputation.recompute import staged_call
from fcp_cli.runtime.ring_attention.ring import Ring


class _DeviceIndices(NamedTuple):
    """The three index arrays of `_Halo` as tensors of one device."""

    sent_rows: Tensor
    gather_index: Tensor
    own_positions: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Halo:
    """Rows that one member sends and receives, and the layout of its kernel input.

    Attributes:
        route: route of the rows before runs.
        sent_rows: [n] own rows that runs of any member need before them, in the order of the route.
        gather_index: [m] rows of the kernel's input, as indices into: own rows, received rows, and a row of zeros.
        own_positions: [own rows] positions of the own rows in the kernel's input.
        memo: the three arrays as tensors, once per device.
    """

    route: Route
    sent_rows: IntArray
    gather_index: IntArray
    own_positions: IntArray
    memo: dict[torch.device, _DeviceIndices] = field(default_factory=dict, repr=False)

    def on_device(self, device: torch.device) -> _DeviceIndices:
        if device not in self.memo:
            arrays = (self.sent_rows, self.gather_index, self.own_positions)
            self.memo[device] = _DeviceIndices(*(to_device(torch.from_numpy(array), device) for array in arrays))
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
    return staged_call(lambda: _compute(convolve, rows, kernel_size, ring))


def _compute(convolve: Callable[[Tensor], Tensor], rows: Tensor, kernel_size: int, ring: Ring) -> Tensor:
    batch, _, tokens = rows.shape
    begin_layer(ring, batch, tokens)
    halo = _halo_of(ring.layout, ring.index, ring.ranks, kernel_size - 1, tokens - ring.tokens)
    sent_rows, gather_index, own_positions = halo.on_device(rows.device)
    own_rows = rows[0].transpose(0, 1)
    received_rows = exchange(own_rows.index_select(0, sent_rows), halo.route, ring.transport)
    candidates = torch.cat((own_rows, received_rows, own_rows.new_zeros(1, own_rows.shape[1])))
    out = convolve(candidates.index_select(0, gather_index).transpose(0, 1).unsqueeze(0))
    return out[0].transpose(0, 1).index_select(0, own_positions).transpose(0, 1).unsqueeze(0)


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
            f"{ring.place}: the pack has masks, and linear attention and state spaces are causal; "
            "plan from a manifest without masks, or train a model without such layers"
        )
    ring.begin_forward(tokens)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _halo_of(layout: ShardLayout, index: int, ranks: tuple[int, ...], reach: int, padding: int) -> _Halo:
    """Return the `reach` rows before each run of one member; every member computes the same from the layout alone."""
    owners, shard_positions = _owners_and_positions(layout)
    lengths = np.asarray(layout.lengths, dtype=np.int64)
    sequence_starts = np.repeat(np.cumsum(lengths) - lengths, lengths)  # of each row of the pack
    needed = [_rows_before_runs(layout.index(member), sequence_starts, reach) for member in range(layout.degree)]
    consumers = np.repeat(np.arange(layout.degree), [(rows >= 0).sum() for rows in needed])
    exchanged_rows = np.concatenate([rows[rows >= 0] for rows in needed]).astype(np.int64)
    producers = owners[exchanged_rows]
    own_pack_rows, rows_before = layout.index(index), needed[index]
    num_own, num_received = own_pack_rows.size + padding, int((rows_before >= 0).sum())
    zeros_index = num_own + num_received
    laid_before = np.full(rows_before.size, zeros_index)
    laid_before[rows_before >= 0] = num_own + np.arange(num_received)
    starts = _run_starts(own_pack_rows, sequence_starts)
    if padding:
        starts, laid_before = np.append(starts, own_pack_rows.size), np.append(laid_before, [zeros_index] * reach)
    gather_index, own_positions = _lay_out(starts, laid_before.reshape(len(starts), reach), num_own)
    return _Halo(
        route=route(producers, consumers, ranks=ranks, index=index),
        sent_rows=shard_positions[exchanged_rows[producers == index]],
        gather_index=gather_index,
        own_positions=own_positions,
    )


def _owners_and_positions(layout: ShardLayout) -> tuple[IntArray, IntArray]:
    """Return the owner of each row of the pack, and the row's position in the owner's shard."""
    owners, shard_positions = np.empty((2, sum(layout.lengths)), dtype=np.int64)
    for member in range(layout.degree):
        rows = layout.index(member)
        owners[rows], shard_positions[rows] = member, np.arange(rows.size)
    return owners, shard_positions


def _run_starts(rows: IntArray, sequence_starts: IntArray) -> IntArray:
    """Return the starts of runs among rows of the pack: runs are consecutive rows of a sequence."""
    continues = (np.diff(rows) == 1) & (np.diff(sequence_starts[rows]) == 0)
    return np.flatnonzero(np.concatenate((np.ones(min(1, rows.size), dtype=bool), ~continues)))


def _rows_before_runs(rows: IntArray, sequence_starts: IntArray, reach: int) -> IntArray:
    """Return [runs * reach] the rows of the pack before each run of a member, -1 if its sequence has none."""
    run_starts = rows[_run_starts(rows, sequence_starts)]
    pack_rows_before = run_starts[:, None] + np.arange(-reach, 0)
    return np.where(pack_rows_before >= sequence_starts[run_starts][:, None], pack_rows_before, -1).ravel()


def _lay_out(starts: IntArray, laid_before: IntArray, num_own: int) -> tuple[IntArray, IntArray]:
    """Concatenate runs, each after the rows before it.

    Args:
        starts: [runs] starts of runs among the own rows.
        laid_before: [runs, reach] indices of the rows before each run.
        num_own: number of own rows.

    Returns:
        `gather_index` and `own_positions` of `_Halo`.
    """
    runs, reach = laid_before.shape
    # Each row is shifted by `reach` for its own run and for every earlier one.
    own_positions = np.arange(num_own) + reach * np.searchsorted(starts, np.arange(num_own), side="right")
    gather_index = np.empty(num_own + laid_before.size, dtype=np.int64)
    gather_index[own_positions] = np.arange(num_own)
    gather_index[(starts + reach * np.arange(runs))[:, None] + np.arange(reach)] = laid_before
    return gather_index, own_positions
