"""Attention in sliding windows: no ring, but the rows that a member's chunks look back at.

Where a token attends to the `window` last ones, itself among them, a chunk needs of other members the keys and values
of the window - 1 tokens before it, its halo (`halo`), and a member's work and bytes do not grow with the pack beyond
its own tokens. Every query meets all its keys in one kernel call, so that no partial results are merged:

    inner   queries that see the member's own rows alone; they are computed while the halo travels
    edge    the first window - 1 of a chunk, with the halo before them

Both are segments whose last query sees the last keys. In backward, the halo travels again, as keys do on a ring; edges
come first, so that the gradients of halo rows travel home while the inner queries are computed.

A window at least as long as the longest sequence masks nothing that causality does not, and runs on the ring. Shorter
ones never send more rows than a ring: a row arrives at a member once at most, and on a ring always does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.runtime.group_member import GroupMember, Kept
from fcp_cli.runtime.halo import FetchedRows, Halo, ReturnedRows, halo_of, ranges
from fcp_cli.runtime.kernels import lse_dtype, select_kernel
from fcp_cli.runtime.layout import CACHED_LAYOUTS, Rows, Segments, ShardLayout
from fcp_cli.runtime.rows import add_to_rows, put, rows_at, take, take_with_lse
from fcp_cli.runtime.transport import Waits


def fits_in(window: int | None, layout: ShardLayout) -> bool:
    """Return whether a window holds all that causality lets a token of a pack see; None is no window."""
    return window is None or window >= max(layout.lengths, default=0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inner:
    """A call with a member's own rows alone.

    Attributes:
        q_rows, k_rows: of the member's buffer.
        segments: the packed call.
    """

    q_rows: Rows
    k_rows: Rows
    segments: Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Edge:
    """A call with rows of others, too.

    Attributes:
        q_rows: of the member's buffer.
        k_rows: of the member's buffer, those that are needed at all; the rows received come behind them.
        num_own: how many these are.
        order: where the call's keys lie in that; a row that two chunks look back at is named twice.
        segments: the packed call.
    """

    q_rows: Rows
    k_rows: Rows
    num_own: int
    order: Rows
    segments: Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowWork:
    """One member's calls; None where no query is of that kind.

    Attributes:
        halo: what it looks back at.
    """

    halo: Halo
    inner: Inner | None
    edge: Edge | None


@lru_cache(maxsize=CACHED_LAYOUTS)
def window_work(layout: ShardLayout, index: int, window: int) -> WindowWork:
    """Return the work of member `index` of a ring of a layout; cached, so that all layers share it."""
    halo = halo_of(layout, index, window - 1)
    # The first window - 1 queries of a run look back beyond it, unless a sequence starts there.
    heads = np.where(halo.counts > 0, np.minimum(window - 1, halo.sizes), 0)
    return WindowWork(halo=halo, inner=_inner(halo, heads, window), edge=_edge(halo, heads, window))


def _inner(halo: Halo, first: IntArray, window: int) -> Inner | None:
    live = np.flatnonzero(first < halo.sizes)
    if not live.size:
        return None
    firsts, sizes, first = halo.firsts[live], halo.sizes[live], first[live]
    return Inner(
        q_rows=rows_at(ranges(firsts + first, sizes - first)),
        k_rows=rows_at(ranges(firsts, sizes)),
        segments=_segments(sizes - first, sizes, window),
    )


def _edge(halo: Halo, heads: IntArray, window: int) -> Edge | None:
    live = np.flatnonzero(heads)
    if not live.size:
        return None
    heads, counts = heads[live], halo.counts[live]
    own = ranges(halo.firsts[live], heads)
    # Per run: the rows before it, then its own.
    keys = np.empty(int((counts + heads).sum()), dtype=np.int64)
    starts = np.cumsum(counts + heads) - counts - heads
    keys[ranges(starts, counts)] = halo.before
    keys[ranges(starts + counts, heads)] = own
    needed = np.unique(keys[keys < halo.tokens])
    order = np.where(keys < halo.tokens, np.searchsorted(needed, keys), keys - halo.tokens + needed.size)
    return Edge(
        q_rows=rows_at(own),
        k_rows=rows_at(needed),
        num_own=needed.size,
        order=rows_at(order),
        segments=_segments(heads, counts + heads, window),
    )


def _segments(q_lengths: IntArray, k_lengths: IntArray, window: int) -> Segments:
    return Segments(tuple(q_lengths.tolist()), tuple(k_lengths.tolist()), causal=True, window=window)


def window_forward(
    ring: GroupMember, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> Waits[tuple[Tensor, Tensor]]:
    """Do what `ring_passes.ring_forward` does where each token attends to the last `window` ones, itself among them."""
    kernel, work = select_kernel(q.device.type, q.dtype), window_work(ring.layout, ring.index, window)
    fetched = FetchedRows("halo", work.halo, ring.ranks, ring.transport, k, v)
    out, lse = q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    if (inner := work.inner) is not None:
        keys = take(k, inner.k_rows), take(v, inner.k_rows)
        _write(out, lse, inner.q_rows, *kernel.forward(take(q, inner.q_rows), *keys, inner.segments, scale))
    received = yield from fetched.rows()
    if (edge := work.edge) is not None:
        keys = _edge_keys(edge, k, received[0]), _edge_keys(edge, v, received[1])
        _write(out, lse, edge.q_rows, *kernel.forward(take(q, edge.q_rows), *keys, edge.segments, scale))
    return out, lse


def window_backward(
    ring: GroupMember, grad_out: Tensor, kept: Kept, scale: float, window: int
) -> Waits[tuple[Tensor, Tensor, Tensor]]:
    """Do what `ring_passes.ring_backward` does where each token attends to the last `window` tokens, itself among them.

    Args:
        ring, scale, window: as given to `window_forward`.
        grad_out: [T, H, Dv].
        kept: q, k, v, out and lse.
    """
    q, k, v, out, lse = kept
    kernel, work = select_kernel(q.device.type, q.dtype), window_work(ring.layout, ring.index, window)
    halo, wire = work.halo, (work.halo, ring.ranks, ring.transport)
    fetched = FetchedRows("halo", *wire, k, v)
    dq, sums = torch.empty_like(q), _KeyGradients(k, v, lse.dtype)
    received = yield from fetched.rows()
    if (edge := work.edge) is not None:
        dos, qs, outs, lses = take_with_lse((grad_out, q, out), lse, edge.q_rows)
        ks, vs = _edge_keys(edge, k, received[0]), _edge_keys(edge, v, received[1])
        share, *of_keys = kernel.backward(dos, qs, ks, vs, outs, lses, edge.segments, scale)
        put(dq, edge.q_rows, share)
        of_received = sums.add_edge(edge, halo.received, *of_keys)
    else:
        of_received = sums.of_rows(halo.received)
    wire_dtype = lse.dtype if ring.grad_dtype == "fp32" else k.dtype
    returned = ReturnedRows("dhalo", *wire, of_received.to(wire_dtype))
    if (inner := work.inner) is not None:
        dos, qs, outs, lses = take_with_lse((grad_out, q, out), lse, inner.q_rows)
        ks, vs = take(k, inner.k_rows), take(v, inner.k_rows)
        share, *of_keys = kernel.backward(dos, qs, ks, vs, outs, lses, inner.segments, scale)
        put(dq, inner.q_rows, share)
        sums.add(inner.k_rows, *of_keys)
    yield from returned.add_to(sums.own)
    return dq, *sums.result()


def _write(out: Tensor, lse: Tensor, rows: Rows, part: Tensor, part_lse: Tensor) -> None:
    put(out, rows, part)
    put(lse, rows, part_lse)


def _edge_keys(edge: Edge, own: Tensor, received: Tensor) -> Tensor:
    """Return [keys, G, D] of an edge's call, of the rows that a member holds and of those that it received."""
    return take(torch.cat((take(own, edge.k_rows), received)), edge.order)


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """Return a copy of [tokens, width] in the shape and type of a tensor: results may not share their memory."""
    return rows.to(like.dtype, copy=True, memory_format=torch.contiguous_format).view(like.shape)


class _KeyGradients:
    """The gradients of a member's keys and values, as the rows [tokens, width] of a halo's message.

    They are summed in the type of lse, and rounded once.
    """

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._k, self._v = k, v
        self._of_keys = k.shape[1:].numel()
        self.own = self._zeros(k.shape[0], dtype)

    def of_rows(self, rows: int) -> Tensor:
        """Return zeros for so many rows."""
        return self._zeros(rows, self.own.dtype)

    def add(self, rows: Rows, dk: Tensor, dv: Tensor) -> None:
        """Add the shares of own rows."""
        self._add(self.own, rows, dk, dv)

    def add_edge(self, edge: Edge, received: int, dk: Tensor, dv: Tensor) -> Tensor:
        """Add the shares of an edge's own rows, and return [received, width] those of the rows that it received."""
        # A row that is named twice gets two shares: whichever comes first, their sum is the same.
        total = self.of_rows(edge.num_own + received)
        self._add(total, edge.order, dk, dv)
        own, of_received = total.split_with_sizes((edge.num_own, received))
        add_to_rows(self.own, edge.k_rows, own)
        return of_received

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (dk, dv), as k and v are."""
        of_k, of_v = self.own[:, : self._of_keys], self.own[:, self._of_keys :]
        return _as(of_k, self._k), _as(of_v, self._v)

    def _zeros(self, rows: int, dtype: torch.dtype) -> Tensor:
        return self._k.new_zeros(rows, self._of_keys + self._v.shape[1:].numel(), dtype=dtype)

    def _add(self, total: Tensor, rows: Rows, dk: Tensor, dv: Tensor) -> None:
        add_to_rows(total[:, : self._of_keys], rows, dk.flatten(1))
        add_to_rows(total[:, self._of_keys :], rows, dv.flatten(1))
