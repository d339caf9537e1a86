"""Sliding-window attention without a ring: each member only receives the rows that its chunks look back at.

If a token attends to the last `window` tokens, itself included, a chunk needs the keys and values of the window - 1
tokens before it, its halo (`halo`), so a member's work and traffic do not depend on the pack beyond its own tokens.
Every query sees all its keys in one kernel call, so no partial results are merged:

    inner   queries that see only the member's own rows; computed while the halo travels
    edge    the first window - 1 queries of a chunk, with the halo before them

Both are segments whose last query sees the last keys. If a mask lets a span of tokens attend bidirectionally, the
window still limits how far back a token sees. The keys of its span ahead are added by up to two more calls, whose
results are merged by their log-sum-exp, as hops of a ring are:

    ahead   tokens of a span within a run and those behind them there: a triangle, causal if both are read backwards
    beyond  tokens of a span within a run and the rest of the span, which comes with the halo

In backward, the halo travels again, as keys do on a ring. Edges come first, so that the gradients of halo rows travel
home while the inner queries are computed.

A window at least as long as every sequence equals full causal attention and runs on the ring, unless a span attends
bidirectionally in windows only. Shorter windows never send more rows than a ring: a row arrives at most once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.masks import Spans
from fcp_cli.runtime.communication.transport import Waits
from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS, RingLayout, Rows, Segments
from fcp_cli.runtime.ring_attention.halo import FetchedRows, Halo, ReturnedRows, halo_of, ranges
from fcp_cli.runtime.ring_attention.ring import AttentionSpec, Ring, SavedForBackward
from fcp_cli.runtime.ring_attention.ring_passes import kernel_of
from fcp_cli.runtime.ring_attention.rows import add, add_to_rows, merge, put, rows_at, take, take_with_lse


def fits_in(window: int, layout: RingLayout) -> bool:
    """Return whether a window equals full attention: it covers every sequence, and no mask is for windows only."""
    return window >= max(layout.lengths, default=0) and not any(mask.windows_only for mask in layout.masks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalCall:
    """Kernel call with only a member's own rows.

    Attributes:
        q_rows, k_rows: rows of the queries and keys in the member's buffer.
        segments: segments of the packed call.
    """

    q_rows: Rows
    k_rows: Rows
    segments: Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HaloCall:
    """Kernel call that also reads rows of other members. Its key buffer holds `k_rows`, then all received rows.

    Attributes:
        q_rows: rows of the queries in the member's buffer.
        k_rows: distinct rows of the own keys in the member's buffer.
        num_own: number of `k_rows`.
        order: positions of the call's keys in the key buffer; a row that two chunks look back at occurs twice.
        segments: segments of the packed call.
    """

    q_rows: Rows
    k_rows: Rows
    num_own: int
    order: Rows
    segments: Segments


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowCalls:
    """Kernel calls of one member; None for a kind without queries.

    Attributes:
        halo: rows of other members that it attends to.
        ahead, beyond: calls that masks add to causal windows.
    """

    halo: Halo
    inner: LocalCall | None
    edge: HaloCall | None
    ahead: LocalCall | None = None
    beyond: HaloCall | None = None


@lru_cache(maxsize=CACHED_LAYOUTS)
def window_work(layout: RingLayout, index: int, window: int) -> WindowCalls:
    """Return the calls of member `index` of a ring; cached, so that all layers share them."""
    halo = halo_of(layout, index, window - 1)
    # The first window - 1 queries of a run look back beyond it, unless a sequence starts there.
    heads = np.where(halo.counts > 0, np.minimum(window - 1, halo.sizes), 0)
    spans = list(_spans_of_runs(layout, halo))
    return WindowCalls(
        halo=halo,
        inner=_inner(halo, heads, window),
        edge=_edge(halo, heads, window),
        ahead=_ahead(spans),
        beyond=_beyond(halo, spans),
    )


def _inner(halo: Halo, first: IntArray, window: int) -> LocalCall | None:
    live = np.flatnonzero(first < halo.sizes)
    if not live.size:
        return None
    firsts, sizes, first = halo.firsts[live], halo.sizes[live], first[live]
    return LocalCall(
        q_rows=rows_at(ranges(firsts + first, sizes - first)),
        k_rows=rows_at(ranges(firsts, sizes)),
        segments=_segments(sizes - first, sizes, window),
    )


def _edge(halo: Halo, heads: IntArray, window: int) -> HaloCall | None:
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
    return _with_received(halo, own, keys, _segments(heads, counts + heads, window))


def _spans_of_runs(layout: RingLayout, halo: Halo) -> Iterator[tuple[int, int, int]]:
    """Yield (run, first row, last row + 1) in the member's buffer per pair of a run and a bidirectional span."""
    for sequence, mask in enumerate(layout.masks):
        assert isinstance(mask, Spans), "chunk pairs have no windows"
        spans = list(mask.seen_both_ways(layout.lengths[sequence]))
        for run in np.flatnonzero(halo.sequences == sequence).tolist():
            size, start, first = int(halo.sizes[run]), int(halo.starts[run]), int(halo.firsts[run])
            for span in spans:
                begin, end = (min(max(position - start, 0), size) for position in span)
                if end > begin:
                    yield run, first + begin, first + end


def _ahead(spans: Sequence[tuple[int, int, int]]) -> LocalCall | None:
    wide = [(begin, end) for _, begin, end in spans if end - begin > 1]
    if not wide:
        return None
    sizes = np.array([end - begin - 1 for begin, end in wide])
    # The last token sees none behind it. Read backwards, the second last sees the last, and so on: causal.
    return LocalCall(
        q_rows=rows_at(np.concatenate([np.arange(end - 2, begin - 1, -1) for begin, end in wide])),
        k_rows=rows_at(np.concatenate([np.arange(end - 1, begin, -1) for begin, end in wide])),
        segments=_segments(sizes, sizes, None),
    )


def _beyond(halo: Halo, spans: Sequence[tuple[int, int, int]]) -> HaloCall | None:
    last = {run: (begin, end) for run, begin, end in spans if halo.aheads[run]}  # only a run's last span can continue
    if not last:
        return None
    queries = np.concatenate([np.arange(*rows) for rows in last.values()])
    sizes = np.array([end - begin for begin, end in last.values()])
    # Not causal: every token of a span sees the whole rest of it.
    segments = Segments(tuple(sizes.tolist()), tuple(halo.aheads[list(last)].tolist()), causal=False)
    return _with_received(halo, queries, halo.after, segments)


def _with_received(halo: Halo, queries: IntArray, keys: IntArray, segments: Segments) -> HaloCall:
    """Return a call whose keys are positions in a buffer of the member's rows followed by those received."""
    # Positions >= `halo.tokens` are received rows.
    needed = np.unique(keys[keys < halo.tokens])
    order = np.where(keys < halo.tokens, np.searchsorted(needed, keys), keys - halo.tokens + needed.size)
    return HaloCall(
        q_rows=rows_at(queries),
        k_rows=rows_at(needed) if needed.size else Rows((0, 0)),
        num_own=needed.size,
        order=rows_at(order),
        segments=segments,
    )


def _segments(q_lengths: IntArray, k_lengths: IntArray, window: int | None) -> Segments:
    return Segments(tuple(q_lengths.tolist()), tuple(k_lengths.tolist()), causal=True, window=window)


def window_forward(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, window: int
) -> Waits[tuple[Tensor, Tensor]]:
    """Run the forward with a sliding window, to which masks may add tokens ahead; see `ring_passes.ring_forward`."""
    kernel, scale, work = kernel_of(q, spec), spec.scale, window_work(ring.ring_layout, ring.index, window)
    fetched = FetchedRows("halo", work.halo, ring.channel, k, v)
    lse = q.new_empty(q.shape[:2], dtype=lse_dtype(q.dtype))
    # Results that are merged further stay in the type of lse, and are rounded once at the end.
    out = q.new_empty(
        *q.shape[:2], v.shape[-1], dtype=q.dtype if work.ahead is None and work.beyond is None else lse.dtype
    )
    if (inner := work.inner) is not None:
        keys = take(k, inner.k_rows), take(v, inner.k_rows)
        _write(out, lse, inner.q_rows, *kernel.forward(take(q, inner.q_rows), *keys, inner.segments, scale))
    received = yield from fetched.rows()
    if (edge := work.edge) is not None:
        keys = _edge_keys(edge, k, received[0]), _edge_keys(edge, v, received[1])
        _write(out, lse, edge.q_rows, *kernel.forward(take(q, edge.q_rows), *keys, edge.segments, scale))
    if (ahead := work.ahead) is not None:
        keys = take(k, ahead.k_rows), take(v, ahead.k_rows)
        part = kernel.forward(take(q, ahead.q_rows), *keys, ahead.segments, scale)
        merge(out, out, None, lse, ahead.q_rows, *part)
    if (beyond := work.beyond) is not None:
        keys = _edge_keys(beyond, k, received[0]), _edge_keys(beyond, v, received[1])
        part = kernel.forward(take(q, beyond.q_rows), *keys, beyond.segments, scale)
        merge(out, out, None, lse, beyond.q_rows, *part)
    return out.to(q.dtype), lse


def window_backward(
    ring: Ring, grad_out: Tensor, kept: SavedForBackward, spec: AttentionSpec, window: int
) -> Waits[tuple[Tensor, Tensor, Tensor]]:
    """Run the backward with a sliding window; see `ring_passes.ring_backward`.

    Args:
        ring, spec, window: as given to `window_forward`.
        grad_out: [T, H, Dv].
        kept: q, k, v, out and lse.
    """
    q, k, v, out, lse = kept
    kernel, scale, work = kernel_of(q, spec), spec.scale, window_work(ring.ring_layout, ring.index, window)
    fetched = FetchedRows("halo", work.halo, ring.channel, k, v)
    is_whole = work.ahead is None and work.beyond is None  # each query has all its keys in one call
    dq = torch.empty_like(q) if is_whole else torch.zeros_like(q, dtype=lse.dtype)
    sums = _KeyGradients(k, v, lse.dtype)

    def of_call(call: LocalCall | HaloCall, ks: Tensor, vs: Tensor) -> tuple[Tensor, Tensor]:
        """Add a call's share to dq; return those of its keys and values."""
        dos, qs, outs, lses = take_with_lse((grad_out, q, out), lse, call.q_rows)
        share, dk, dv = kernel.backward(dos, qs, ks, vs, outs, lses, call.segments, scale)
        if is_whole:
            put(dq, call.q_rows, share)
        else:
            add(dq, dq, None, call.q_rows, share)
        return dk, dv

    received = yield from fetched.rows()
    of_received = sums.of_rows(work.halo.received)
    for edge in (work.edge, work.beyond):
        if edge is not None:
            ks, vs = _edge_keys(edge, k, received[0]), _edge_keys(edge, v, received[1])
            sums.add_edge(edge, of_received, *of_call(edge, ks, vs))
    wire_dtype = lse.dtype if ring.grad_dtype == "fp32" else k.dtype
    returned = ReturnedRows("dhalo", work.halo, ring.channel, of_received.to(wire_dtype))
    for inner in (work.inner, work.ahead):
        if inner is not None:
            sums.add(inner.k_rows, *of_call(inner, take(k, inner.k_rows), take(v, inner.k_rows)))
    yield from returned.add_to(sums.own)
    return dq.to(q.dtype), *sums.result()


def _write(out: Tensor, lse: Tensor, rows: Rows, part: Tensor, part_lse: Tensor) -> None:
    put(out, rows, part)
    put(lse, rows, part_lse)


def _edge_keys(edge: HaloCall, own: Tensor, received: Tensor) -> Tensor:
    """Return the keys (or values) [keys, G, D] of a call, from a member's own and received rows."""
    return take(torch.cat((take(own, edge.k_rows), received)), edge.order)


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """Return a copy of [tokens, width] in a tensor's shape and type; results must not share memory."""
    return rows.to(like.dtype, copy=True, memory_format=torch.contiguous_format).view(like.shape)


class _KeyGradients:
    """Gradients of a member's keys and values, as rows [tokens, width] like those of a halo message.

    They are accumulated in the type of lse, and rounded once.
    """

    def __init__(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self._k, self._v = k, v
        self._of_keys = k.shape[1:].numel()
        self.own = self._zeros(k.shape[0], dtype)

    def of_rows(self, rows: int) -> Tensor:
        """Return zeros for `rows` rows."""
        return self._zeros(rows, self.own.dtype)

    def add(self, rows: Rows, dk: Tensor, dv: Tensor) -> None:
        """Add gradients of own rows."""
        self._add(self.own, rows, dk, dv)

    def add_edge(self, edge: HaloCall, received: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add an edge's key gradients: of own rows to `own`, of received rows to `received` [rows, width]."""
        # A row that occurs twice in `order` gets two shares, whose sum does not depend on their order.
        total = self.of_rows(edge.num_own + len(received))
        self._add(total, edge.order, dk, dv)
        add_to_rows(self.own, edge.k_rows, total[: edge.num_own])
        received += total[edge.num_own :]

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (dk, dv) in the shapes and types of k and v."""
        of_k, of_v = self.own[:, : self._of_keys], self.own[:, self._of_keys :]
        return _as(of_k, self._k), _as(of_v, self._v)

    def _zeros(self, rows: int, dtype: torch.dtype) -> Tensor:
        return self._k.new_zeros(rows, self._of_keys + self._v.shape[1:].numel(), dtype=dtype)

    def _add(self, total: Tensor, rows: Rows, dk: Tensor, dv: Tensor) -> None:
        add_to_rows(total[:, : self._of_keys], rows, dk.flatten(1))
        add_to_rows(total[:, self._of_keys :], rows, dv.flatten(1))
