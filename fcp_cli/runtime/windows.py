"""Sliding-window attention without a ring: each member only receives the rows that its chunks look back at.

If a token attends to the last `window` tokens, itself included, a chunk needs the keys and values of the window - 1
tokens before it, its halo, so a member's work and traffic do not depend on the pack beyond its own tokens.
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
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fcp_cli.runtime.kernels import lse_dtype
from fcp_cli.runtime.layout import CACHED_LAYOUTS, RingLayout, Rows, Runs, Segments
from fcp_cli.runtime.ring import AttentionSpec, Ring, SavedForBackward
from fcp_cli.runtime.ring_passes import kernel_of
from fcp_cli.runtime.rows import add, add_to_rows, merge, put, rows_at, take, take_with_lse
from fcp_cli.runtime.transport import GroupChannel, Handle, Waits
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.masks import Spans


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
) -> Waits[SavedForBackward]:
    """Run the forward with a sliding window, to which masks may add tokens ahead; see `ring_passes.ring_forward`."""
    kernel, scale, work = kernel_of(ring, q, spec), spec.scale, window_work(ring.ring_layout, ring.index, window)
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
    return SavedForBackward(q, k, v, out.to(q.dtype), lse)


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
    kernel, scale, work = kernel_of(ring, q, spec), spec.scale, window_work(ring.ring_layout, ring.index, window)
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
            add(dq, dq, call.q_rows, share)
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


# Halo exchange: receive the rows around every chunk of a shard, and return their gradients to their owners.
#
# A layer that looks back a few tokens, such as sliding-window attention, needs the last rows before each of a
# member's chunks, its *halo*, but not the rest of the pack. If a mask lets a span of tokens attend bidirectionally,
# the halo includes the span's rows after the chunk. Consecutive chunks are held by ring neighbours, so halos use the
# ring's own connections: in round n every member sends the next member the rows that it needs from the member n
# places before it, then the previous member those from the member n places behind it.
#
#     front chunks  0 -> 1 -> .. -> d-1         back chunks  d -> d+1 -> .. -> 2d-1
#     members       0 -> 1 -> .. -> d-1                      d-1 -> d-2 -> .. -> 0
#
# If chunks are shorter than the halo, a second round forwards the rows of the first, and so on. Members between a
# row's owner and its reader hold chunks in between and read the row, too, so each row arrives once, and only where it
# is read. Masks are the exception: they may cut sequences so short that a member only forwards rows. Backward runs
# the rounds in reverse order and direction, and sums gradients on the way.
#
# All sizes follow from the layout. Every round is one send and one receive for fronts, then one of each for backs, in
# the same order on all members, so it cannot deadlock (`transport`).


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HaloMessage:
    """One send and receive of a round, as seen by one member.

    Attributes:
        to, source: index of the receiver and of the sender in the ring; they do not wrap around.
        is_own: whether the sent rows are the member's own; else it received them in an earlier round.
        sent: indices of the sent rows, or None if there are none.
        num_sent: number of sent rows.
        received: (start, stop) of this message among all rows that the member receives; may be empty.
    """

    to: int
    source: int
    is_own: bool
    sent: Rows | None
    num_sent: int
    received: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Halo:
    """Halo of one ring member: the rows of other members that it reads. Get it from `halo_of`, which caches.

    A *run* is a maximal range of consecutive tokens of a sequence on a member: a chunk, or its two chunks if adjacent.

    Attributes:
        index: the member's index in the ring.
        tokens: number of rows it holds.
        received: number of rows it receives.
        rounds: messages of each round, in the order of issue.
        firsts: [runs] start of each run in the member's buffer.
        sizes: [runs] rows of each run.
        sequences, starts: [runs] sequence of each run, and its start position there.
        counts: [runs] rows that each run looks back at; below the reach near the start of a sequence.
        before: [sum(counts)] positions of these rows in a buffer of the member's rows followed by those received.
        aheads: [runs] rows behind each run that its last token sees by the sequence's mask.
        after: [sum(aheads)] positions of these rows, as in `before`.
    """

    index: int
    tokens: int
    received: int
    rounds: tuple[tuple[HaloMessage, ...], ...]
    firsts: IntArray
    sizes: IntArray
    sequences: IntArray
    starts: IntArray
    counts: IntArray
    before: IntArray
    aheads: IntArray
    after: IntArray


@lru_cache(maxsize=CACHED_LAYOUTS)
def halo_of(layout: RingLayout, index: int, reach: int) -> Halo:
    """Return the halo of member `index` of a ring if each token reads the `reach` tokens before it.

    Args:
        layout: layout of the ring; for a group, its `ShardLayout.ring`.
        index: index in the ring.
        reach: number of rows, >= 0.
    """
    return HaloRoutes(layout, reach).halo(index)


class FetchedRows:
    """Forward halo exchange; construction starts its first round.

    Args:
        kind: message name for records and errors.
        halo: halo of this member.
        channel: messages between the members of the ring.
        tensors: [tokens, n, ...] each, of one data type; a message carries the rows of all.
    """

    def __init__(self, kind: str, halo: Halo, channel: GroupChannel, *tensors: Tensor) -> None:
        self._kind, self._halo, self._channel = kind, halo, channel
        self._tensors = tensors
        widths = [tensor.shape[1:].numel() for tensor in tensors]
        self._columns = [slice(*ends) for ends in pairwise(accumulate(widths, initial=0))]
        self._received = tensors[0].new_empty(halo.received, sum(widths))
        self._under_way = self._issue(0)

    def rows(self) -> Waits[list[Tensor]]:
        """Run the remaining rounds of the exchange; yield the handles it waits for.

        Returns:
            [halo.received, n, ...] per tensor; its last dimension is contiguous.
        """
        for number in range(len(self._halo.rounds)):
            if number:
                self._under_way = self._issue(number)
            for handle, _ in self._under_way:
                if handle is not None:
                    yield handle
        self._under_way = []
        return [
            self._received[:, column].view(-1, *tensor.shape[1:])
            for tensor, column in zip(self._tensors, self._columns, strict=True)
        ]

    def _issue(self, number: int) -> list[tuple[Handle | None, Tensor | None]]:
        under_way = []
        for message in _messages(self._halo, number):
            sent = None if message.sent is None else self._sent(message, message.sent)
            start, stop = message.received
            received = self._received[start:stop] if stop > start else None
            # Keep `sent` alive until it has been sent.
            handle = self._channel.start(self._kind, sent, message.to, received, message.source)
            under_way.append((handle, sent))
        return under_way

    def _sent(self, message: HaloMessage, rows: Rows) -> Tensor:
        if not message.is_own:
            return take(self._received, rows)
        parts = [take(tensor, rows).flatten(1) for tensor in self._tensors]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()


class ReturnedRows:
    """Backward halo exchange; construction starts its first round.

    Args:
        kind, halo, channel: see `FetchedRows`.
        received: [halo.received, width] gradients of the rows that the forward received; changed in place.
    """

    def __init__(self, kind: str, halo: Halo, channel: GroupChannel, received: Tensor) -> None:
        self._kind, self._halo, self._channel = kind, halo, channel
        self._received = received
        self._last = len(halo.rounds) - 1
        self._under_way = self._issue(self._last)

    def add_to(self, own: Tensor) -> Waits[None]:
        """Add the gradients from other members to those [tokens, width] of the own rows, in place.

        Run the remaining rounds of the exchange; yield the handles to wait for.
        """
        for number in range(self._last, -1, -1):
            if number < self._last:
                self._under_way = self._issue(number)
            for handle, message, arrived in self._under_way:
                if handle is not None:
                    yield handle
                if message.sent is not None and arrived is not None:
                    add_to_rows(own if message.is_own else self._received, message.sent, arrived)
        self._under_way = []

    def _issue(self, number: int) -> list[tuple[Handle | None, HaloMessage, Tensor | None]]:
        under_way = []
        for message in _messages(self._halo, number):
            start, stop = message.received
            sent = self._received[start:stop] if stop > start else None
            count = message.num_sent
            arrived = self._received.new_empty(count, self._received.shape[1]) if count else None
            handle = self._channel.start(self._kind, sent, message.source, arrived, message.to)
            under_way.append((handle, message, arrived))
        return under_way


def _messages(halo: Halo, number: int) -> tuple[HaloMessage, ...]:
    return halo.rounds[number] if halo.rounds else ()


class HaloRoutes:
    """Routing of halo rows: which rows travel to which member in which round."""

    def __init__(self, layout: RingLayout, reach: int) -> None:
        self._layout, self._reach = layout, reach
        lengths = np.asarray(layout.lengths, dtype=np.int64)
        self._bases = np.cumsum(lengths) - lengths
        held = [layout.runs(member) for member in range(layout.degree)]
        starts = np.concatenate([self._bases[runs.sequences] + runs.starts for runs in held])
        members = np.repeat(np.arange(layout.degree), [len(runs.sizes) for runs in held])
        live = np.concatenate([runs.sizes for runs in held]) > 0
        # No ties: without empty chunks all starts differ.
        order = np.argsort(starts[live])
        self._starts, self._members = starts[live][order], members[live][order]

    def halo(self, index: int) -> Halo:
        layout, received, rounds = self._layout, [np.empty(0, dtype=np.int64)], []
        own, runs, num_received = layout.index(index), self._runs(index), 0
        needed = self._needed_near(index)
        for number in range(1, max((abs(rows.distances).max(initial=0) for rows in needed.values()), default=0) + 1):
            batches = []
            # Rows of earlier members travel up the ring, those of later members down it.
            for step in (1, -1):
                arrives = needed[index].from_afar(step * number)
                leaves = needed[index + step].from_afar(step * number) if index + step in needed else arrives[:0]
                if not arrives.size and not leaves.size:
                    continue  # both ends know this from the layout, and some back ends reject empty messages
                places = _positions(leaves, own, *received)
                batches.append(
                    HaloMessage(
                        to=index + step,
                        source=index - step,
                        # All rows have one owner, `number` - 1 places away: this member in round 1, later one whose
                        # rows came in the round before.
                        is_own=not places.size or bool(places[0] < own.size),
                        sent=_rows_or_none(places, own.size),
                        num_sent=places.size,
                        received=(num_received, num_received + arrives.size),
                    )
                )
                received.append(arrives)
                num_received += arrives.size
            if batches:
                rounds.append(tuple(batches))
        return Halo(
            index=index,
            tokens=own.size,
            received=num_received,
            rounds=tuple(rounds),
            firsts=np.cumsum(runs.sizes) - runs.sizes,
            sizes=runs.sizes,
            starts=runs.starts,
            sequences=runs.sequences,
            counts=np.minimum(runs.starts, self._reach),
            before=_positions(self._before(runs), own, *received),
            aheads=self._aheads(runs),
            after=_positions(self._after(runs), own, *received),
        )

    def _needed_near(self, index: int) -> dict[int, _Needed]:
        """Return the rows that a member and its neighbours receive; both ends of a message compute the same."""
        degree = self._layout.degree
        near = [member for member in (index - 1, index, index + 1) if 0 <= member < degree]
        if not self._layout.masks:  # every member between a row's owner and its reader reads the row, too
            return {member: self._needed(member) for member in near}
        # A member without tokens of a short stretch forwards rows that others read beyond it.
        looked = [self._needed(member) for member in range(degree)]
        rows = {member: [looked[member].rows] for member in near}
        for member, (other, of) in product(near, enumerate(looked)):
            is_beyond = of.distances > other - member if other > member else of.distances < other - member
            rows[member].append(of.rows[is_beyond & (other != member)])
        return {member: self._from_others(member, np.unique(np.concatenate(parts))) for member, parts in rows.items()}

    def _needed(self, member: int) -> _Needed:
        """Return the rows of other members that a member reads."""
        runs = self._runs(member)
        return self._from_others(member, np.unique(np.concatenate((self._before(runs), self._after(runs)))))

    def _from_others(self, member: int, rows: IntArray) -> _Needed:
        # A row belongs to the last chunk that starts at or before it.
        owners = self._members[np.searchsorted(self._starts, rows, side="right") - 1]
        others = owners != member
        return _Needed(rows[others], member - owners[others])

    def _before(self, runs: Runs) -> IntArray:
        """Return the rows of the pack that runs look back at."""
        counts = np.minimum(runs.starts, self._reach)
        return ranges(self._bases[runs.sequences] + runs.starts - counts, counts)

    def _after(self, runs: Runs) -> IntArray:
        """Return the rows of the pack behind each run's last row that masks let it see."""
        return ranges(self._bases[runs.sequences] + runs.starts + runs.sizes, self._aheads(runs))

    def _aheads(self, runs: Runs) -> IntArray:
        counts = np.zeros_like(runs.sizes)
        for sequence, mask in enumerate(self._layout.masks):
            assert isinstance(mask, Spans), "chunk pairs have no windows"
            own = np.flatnonzero(runs.sequences == sequence)
            stops = runs.starts[own] + runs.sizes[own]
            for start, stop in mask.seen_both_ways(self._layout.lengths[sequence]):
                reaches = (start < stops) & (stops < stop)
                counts[own[reaches]] = stop - stops[reaches]
        return counts

    def _runs(self, index: int) -> Runs:
        """Return a member's runs; adjacent chunks are merged."""
        runs = self._layout.runs(index)
        runs = Runs(*(values[runs.sizes > 0] for values in runs))
        follows = np.zeros(len(runs.sizes), dtype=np.bool_)
        stops = runs.starts + runs.sizes
        follows[1:] = (runs.sequences[1:] == runs.sequences[:-1]) & (runs.starts[1:] == stops[:-1])
        firsts = np.flatnonzero(~follows)
        sizes = np.add.reduceat(runs.sizes, firsts) if firsts.size else runs.sizes
        return Runs(runs.sequences[firsts], runs.starts[firsts], sizes)


class _Needed(NamedTuple):
    """Rows of the pack that a member receives, ascending, and their owners' distances (positive if before it)."""

    rows: IntArray
    distances: IntArray

    def from_afar(self, places: int) -> IntArray:
        """Return the rows whose owner is `places` before this member (negative: behind it)."""
        rows: IntArray = self.rows[self.distances == places]
        return rows


def ranges(starts: IntArray, sizes: IntArray) -> IntArray:
    """Return [sum(sizes)] the concatenated ranges start .. start + size - 1."""
    offsets = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    ranges: IntArray = np.arange(int(sizes.sum()), dtype=np.int64) + offsets
    return ranges


def _positions(wanted: IntArray, *held: IntArray) -> IntArray:
    """Return the positions of the wanted rows in the concatenation of `held`."""
    rows = np.concatenate(held)
    order = np.argsort(rows)
    found: IntArray = order[np.searchsorted(rows, wanted, sorter=order)] if wanted.size else wanted
    assert np.array_equal(rows[found], wanted), "a member lacks rows that it looks back at, or passes on"
    return found


def _rows_or_none(places: IntArray, own: int) -> Rows | None:
    if not places.size:
        return None
    return rows_at(places if places[0] < own else places - own)
