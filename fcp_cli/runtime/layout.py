"""Layout of a pack on a ring: exact, uneven zig-zag chunks of every sequence.

A sequence of L tokens on a ring of degree d is cut into 2d chunks; chunk j has ``L // 2d + (j < L % 2d)`` tokens, so
the chunks cover any L without padding. Member r holds chunk r (its *front*) and chunk 2d-1-r (its *back*) of every
sequence, which balances the causal triangle over members. A member's local buffer is the concatenation over the
sequences of [front, back].

Example: L = 10 tokens on d = 2 members, 2d = 4 chunks of 3, 3, 2 and 2 tokens:

    position   0 1 2 | 3 4 5 | 6 7 | 8 9
    member       0   |   1   |  1  |  0       member 0 holds [0 1 2 8 9], member 1 holds [3 4 5 6 7]

With Ulysses degree u, the d members form a ring of d / u Ulysses groups. A Ulysses group holds the tokens of one member
of such a ring, split into consecutive runs over its members, whose sizes differ by at most one token (`UlyssesLayout`).

All shapes follow from (lengths, degree, Ulysses degree) alone, so ranks never exchange sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fcp_cli.errors import RunError
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.masks import Area, Mask

Value = TypeVar("Value")

# Memory per layout is a few bytes per token of the rank; a step rarely has more than a few dozen micro-batches.
CACHED_LAYOUTS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Sequences of one packed attention call, as host integers. No segment has an empty side.

    Attributes:
        q_lengths, k_lengths: number of queries and of keys per segment.
        causal: query i sees keys 0..i of its segment (both lengths are equal without a window); else every query sees
            every key.
        window: sliding window of causal segments: maximum number of keys per query, itself included. The last query is
            aligned with the last key, and a segment may have more keys than queries.
        memo: values that a kernel derived from the lengths (`derived`), freed with the layout.
    """

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    window: int | None = None

    def derived(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the cached `make()`: a layout serves all layers of a model, and many micro-batches."""
        if key not in self.memo:
            self.memo[key] = make()
        value: Value = self.memo[key]
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a member's local buffer: a slice if they are contiguous, else positions.

    Attributes:
        span: the rows as (start, stop), or None if they are not contiguous.
        positions: [n] int64; set if `span` is None.
        memo: positions as a tensor per device.
    """

    span: tuple[int, int] | None
    positions: IntArray | None = None
    memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """One kernel call of a member with the keys and values of one source member.

    Attributes:
        q_rows: rows of its own buffer.
        k_rows: rows of the source's buffer.
        segments: the packed attention call over those rows.
    """

    q_rows: Rows
    k_rows: Rows
    segments: Segments


class Runs(NamedTuple):
    """Chunks of a member in buffer order: [chunks] sequence of each, its start there, and its size."""

    sequences: IntArray
    starts: IntArray
    sizes: IntArray


class ShardLayout(ABC):
    """Layout of one pack on a group: the tokens of each member. Immutable; created and cached by `shard_layout`.

    Attributes:
        lengths: tokens of each sequence of the pack.
        degree: number of members of the group.
        masks: mask of each sequence, or () if all are causal.
    """

    __slots__ = ("_tokens", "degree", "lengths", "masks")

    ulysses_degree = 1
    """Ulysses degree: number of members that split the heads of their joint tokens."""

    def __init__(self, lengths: tuple[int, ...], degree: int, masks: tuple[Mask, ...], tokens: list[int]) -> None:
        self.lengths = lengths
        self.degree = degree
        self.masks = masks
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}(lengths={self.lengths}, degree={self.degree}, masks={self.masks})"

    @property
    @abstractmethod
    def ring(self) -> RingLayout:
        """Return the layout of the ring: this one or, with Ulysses, the one over Ulysses groups."""

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of the pack."""
        return sum(self._tokens)

    @property
    def most_tokens(self) -> int:
        """Return the largest number of tokens of any member: the size of receive buffers."""
        return max(self._tokens)

    def tokens(self, index: int) -> int:
        """Return the number of tokens of member `index`."""
        return self._tokens[index]

    @abstractmethod
    def position_ids(self, index: int) -> IntArray:
        """Return the position [tokens(index)] of each local token in its sequence."""

    @abstractmethod
    def index(self, index: int) -> IntArray:
        """Return the position [tokens(index)] of each local token in the pack; ``pack[index]`` is the shard."""


class RingLayout(ShardLayout):
    """Layout of one pack on a ring whose members hold chunks of its sequences."""

    __slots__ = ("_hops",)

    def __init__(self, lengths: tuple[int, ...], degree: int, masks: tuple[Mask, ...], tokens: list[int]) -> None:
        super().__init__(lengths, degree, masks, tokens)
        self._hops: dict[tuple[int, int, bool], tuple[Hop, ...]] = {}

    @property
    def ring(self) -> RingLayout:
        return self

    def index(self, index: int) -> IntArray:
        bases = _offsets(np.asarray(self.lengths, dtype=np.int64))
        return self._places(index) + np.repeat(bases, self.owned(index))

    def hops(self, member: int, source: int, *, packed: bool = True) -> tuple[Hop, ...]:
        """Return the kernel calls of `member` with the keys and values of `source`; empty if no query sees a key.

        Zig-zag chunks are ordered in time: the front of an earlier source comes before all tokens of the member, and
        both chunks of a later source lie between the member's front and back. Only the member's own chunks need a
        causal mask.

        Args:
            member: ring index of the computing rank.
            source: ring index of the rank whose keys it holds.
            packed: one call for all sequences, whose rows may be scattered; else one call per sequence, with contiguous
                rows.
        """
        key = (member, source, packed)
        if key not in self._hops:
            self._hops[key] = self._make_hops(member, source, packed)
        return self._hops[key]

    @abstractmethod
    def runs(self, index: int) -> Runs:
        """Return the chunks of member `index` in buffer order; chunks may be empty."""

    @abstractmethod
    def owned(self, index: int) -> IntArray:
        """Return the number of tokens of each sequence [sequences] that member `index` holds."""

    @abstractmethod
    def _make_hops(self, member: int, source: int, packed: bool) -> tuple[Hop, ...]: ...

    def _places(self, index: int) -> IntArray:
        """Return the position [tokens(index)] of each local token in its sequence."""
        _, starts, sizes = self.runs(index)
        return np.arange(self._tokens[index], dtype=np.int64) + np.repeat(starts - _offsets(sizes), sizes)


class ZigZagLayout(RingLayout):
    """Exact uneven zig-zag layout of a pack of causal sequences.

    Args:
        lengths: tokens of each sequence of the pack, each >= 1; empty for an idle rank.
        degree: number of members of the ring, >= 1.
    """

    __slots__ = ("_backs", "_fronts", "_q_rows")

    def __init__(self, lengths: tuple[int, ...], degree: int) -> None:
        assert degree >= 1, degree
        assert all(length >= 1 for length in lengths), lengths
        chunk, extra = np.divmod(np.asarray(lengths, dtype=np.int64), 2 * degree)
        sizes = chunk[:, None] + (np.arange(2 * degree) < extra[:, None])  # [sequences, 2d]
        self._fronts = sizes[:, :degree].T  # [degree, sequences]
        self._backs = sizes[:, : degree - 1 : -1].T
        self._q_rows: dict[Hashable, tuple[Rows, ...]] = {}
        super().__init__(lengths, degree, (), (self._fronts + self._backs).sum(axis=1).tolist())

    def position_ids(self, index: int) -> IntArray:
        return self._places(index)

    def owned(self, index: int) -> IntArray:
        owned: IntArray = self._fronts[index] + self._backs[index]
        return owned

    def runs(self, index: int) -> Runs:
        """Return front_0, back_0, front_1, back_1, ...; chunks may be empty."""
        lengths = np.asarray(self.lengths, dtype=np.int64)
        sizes = np.stack((self._fronts[index], self._backs[index]), axis=1).ravel()
        chunks = np.array((index, 2 * self.degree - 1 - index))
        chunk, extra = np.divmod(lengths, 2 * self.degree)
        starts = chunks * chunk[:, None] + np.minimum(chunks, extra[:, None])
        return Runs(np.repeat(np.arange(len(lengths)), 2), starts.ravel(), sizes)

    def _make_hops(self, member: int, source: int, packed: bool) -> tuple[Hop, ...]:
        fronts, owned = self._fronts, self._fronts + self._backs
        if source == member:
            q_sizes = k_sizes = owned[member]
        elif source < member:
            q_sizes, k_sizes = owned[member], fronts[source]
        else:
            q_sizes, k_sizes = self._backs[member], owned[source]
        # In the local buffer, the back of a sequence follows its front.
        q_starts = _offsets(owned[member]) + (fronts[member] if source > member else 0)
        k_starts = _offsets(owned[source])
        # A sequence of fewer than 2d tokens has empty chunks, which kernels reject.
        live = np.flatnonzero((q_sizes > 0) & (k_sizes > 0))
        # One call for all live sequences, or one for each; none if no sequence is live.
        calls = [live] if packed and live.size else live[:, None]
        # All hops of later members read the same queries. Return one object, so that `_Gathered` gathers them once.
        key = (member, source > member, packed, live.tobytes())
        if key not in self._q_rows:
            self._q_rows[key] = tuple(_rows(q_starts[i], q_sizes[i]) for i in calls)
        return tuple(
            Hop(
                q_rows=q_rows,
                k_rows=_rows(k_starts[i], k_sizes[i]),
                segments=Segments(tuple(q_sizes[i].tolist()), tuple(k_sizes[i].tolist()), source == member),
            )
            for q_rows, i in zip(self._q_rows[key], calls, strict=True)
        )


class MaskedLayout(RingLayout):
    """Layout of a pack with masks: zig-zag chunks of the stretches that a mask cuts its sequence into.

    Causal sequences of the pack keep their usual chunks and join the same calls.
    """

    __slots__ = ("_sequences",)

    def __init__(self, lengths: tuple[int, ...], degree: int, masks: tuple[Mask, ...]) -> None:
        self._sequences = [MaskedChunks(mask, length, degree) for mask, length in zip(masks, lengths, strict=True)]
        super().__init__(lengths, degree, masks, np.sum([one.tokens for one in self._sequences], axis=0).tolist())

    def position_ids(self, index: int) -> IntArray:
        positions = [mask.position_ids(length) for mask, length in zip(self.masks, self.lengths, strict=True)]
        return np.concatenate(positions)[self.index(index)]

    def owned(self, index: int) -> IntArray:
        return np.array([one.tokens[index] for one in self._sequences], dtype=np.int64)

    def runs(self, index: int) -> Runs:
        starts, sizes = zip(*(one.runs(index) for one in self._sequences), strict=True)
        sequences = np.repeat(np.arange(len(sizes)), [len(of_one) for of_one in sizes])
        return Runs(sequences, np.concatenate(starts), np.concatenate(sizes))

    def _make_hops(self, member: int, source: int, packed: bool) -> tuple[Hop, ...]:
        calls = joined_calls([one.calls(member, source) for one in self._sequences])
        if not packed:
            calls = [[piece] for call in calls for piece in call]
        q_bases, k_bases = _offsets(self.owned(member)), _offsets(self.owned(source))
        return tuple(_hop(call, q_bases, k_bases) for call in calls)


class UlyssesLayout(ShardLayout):
    """Layout of one pack on a group with Ulysses: a ring layout over Ulysses groups, split over their members.

    Ulysses group i // u of member i holds the T tokens of member i // u of a ring of degree d / u. Its member i % u
    holds the (i % u)-th run of them: T // u tokens, plus one for the first T % u members.

    Args:
        lengths: as for the ring.
        degree: number of members, a multiple of `ulysses_degree`.
        ulysses_degree: Ulysses degree, >= 2.
        masks: as for the ring.
    """

    __slots__ = ("_ring", "_starts", "ulysses_degree")

    def __init__(
        self, lengths: tuple[int, ...], degree: int, ulysses_degree: int, masks: tuple[Mask, ...] = ()
    ) -> None:
        assert degree % ulysses_degree == 0, (degree, ulysses_degree)
        self.ulysses_degree = ulysses_degree
        self._ring = shard_layout(lengths, degree // ulysses_degree, *([1, masks] if masks else [])).ring
        held = np.array([self._ring.tokens(place) for place in range(self._ring.degree)], dtype=np.int64)
        run, extra = np.divmod(held, ulysses_degree)
        sizes = run[:, None] + (np.arange(ulysses_degree) < extra[:, None])  # [Ulysses groups, u]
        self._starts: list[int] = (np.cumsum(sizes, axis=1) - sizes).ravel().tolist()
        super().__init__(lengths, degree, masks, sizes.ravel().tolist())

    @property
    def ring(self) -> RingLayout:
        return self._ring

    def position_ids(self, index: int) -> IntArray:
        return self._own_run(index, self._ring.position_ids(index // self.ulysses_degree))

    def index(self, index: int) -> IntArray:
        return self._own_run(index, self._ring.index(index // self.ulysses_degree))

    def _own_run(self, index: int, of_group: IntArray) -> IntArray:
        return of_group[self._starts[index] : self._starts[index] + self._tokens[index]]


@lru_cache(maxsize=CACHED_LAYOUTS)
def shard_layout(
    lengths: tuple[int, ...], degree: int, ulysses_degree: int = 1, masks: tuple[Mask, ...] = ()
) -> ShardLayout:
    """Return the layout of a pack on a group; cached, so micro-batches of equal shape share it.

    Args:
        lengths: tokens of each sequence.
        degree: number of members of the group.
        ulysses_degree: Ulysses degree: consecutive members that split the heads; divides `degree`.
        masks: mask of each sequence; empty if all are causal.
    """
    if all(mask.is_causal for mask in masks):
        masks = ()
    if ulysses_degree > 1:
        return UlyssesLayout(lengths, degree, ulysses_degree, masks)
    if masks:
        return MaskedLayout(lengths, degree, masks)
    return ZigZagLayout(lengths, degree)


def _offsets(sizes: IntArray) -> IntArray:
    """Return the exclusive prefix sum."""
    return np.cumsum(sizes) - sizes


def _hop(call: list[tuple[int, Piece]], q_bases: IntArray, k_bases: IntArray) -> Hop:
    """Return the kernel call of pieces, whose rows count from the start of their sequences."""
    return Hop(
        q_rows=_rows_of(np.concatenate([piece.queries + q_bases[sequence] for sequence, piece in call])),
        k_rows=_rows_of(np.concatenate([piece.keys + k_bases[sequence] for sequence, piece in call])),
        segments=Segments(
            tuple(len(piece.queries) for _, piece in call),
            tuple(len(piece.keys) for _, piece in call),
            call[0][1].causal,
        ),
    )


def _rows_of(positions: IntArray) -> Rows:
    first, total = int(positions[0]), len(positions)
    is_span = np.array_equal(positions, np.arange(first, first + total))
    return Rows((first, first + total)) if is_span else Rows(None, positions)


def _rows(starts: IntArray, sizes: IntArray) -> Rows:
    total = int(sizes.sum())
    first = int(starts[0])
    if total == int(starts[-1] + sizes[-1]) - first:
        return Rows((first, first + total))
    return Rows(None, np.arange(total, dtype=np.int64) + np.repeat(starts - _offsets(sizes), sizes))


# Layout of one masked sequence on a ring: the tokens of each member, and the kernel calls that implement the mask.
#
# A mask cuts a sequence into stretches (`Mask.cuts`), each of which is cut into 2d chunks like a whole causal
# sequence: member r holds chunks r and 2d-1-r of every stretch, in token order. Between any two members, an area of
# the mask then is one rectangle or triangle of consecutive rows in both buffers:
#
#     area             own keys             keys of an earlier member     keys of a later member
#     full, [q, k]     q x k                q x k                         q x k
#     causal           triangle             all x fronts                  backs x all
#     keys after own   triangle, reversed   all x backs                   fronts x all
#
# A triangle of keys after a query's own is causal if queries and keys are read backwards, so kernels need no special
# mask.
#
# A kernel call must not contain a query or key twice, since results are merged and gradients added row by row. Each
# piece joins the first call in which its rows are free. A mask lists its areas in rounds, which bound the number of
# calls of each kind.


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of a member that see rows of a source, counted from the sequence's first row in each buffer.

    Attributes:
        queries, keys: [n] and [m] rows, both non-empty.
        causal: query i sees keys 0..i (then n = m); else every query sees every key.
    """

    queries: IntArray
    keys: IntArray
    causal: bool = False


class MaskedChunks:
    """Tokens of each member of a ring, and the kernel calls between members, for one masked sequence.

    Args:
        mask: must fit the length.
        length: number of tokens, >= 1.
        degree: number of members of the ring.
    """

    __slots__ = ("_areas", "_cuts", "_degree", "_sizes", "_starts", "tokens")

    def __init__(self, mask: Mask, length: int, degree: int) -> None:
        cuts = mask.cuts(length) if degree > 1 else (0, length)  # on one rank, cuts would only add calls
        self._degree = degree
        self._cuts = np.array(cuts, dtype=np.int64)
        self._areas = mask.areas(length, cuts)
        chunk, extra = np.divmod(np.diff(self._cuts), 2 * degree)
        numbers = np.arange(2 * degree)
        sizes = chunk[:, None] + (numbers < extra[:, None])  # [stretches, 2d]
        starts = self._cuts[:-1, None] + numbers * chunk[:, None] + np.minimum(numbers, extra[:, None])
        own = [[member, 2 * degree - 1 - member] for member in range(degree)]
        self._starts: list[IntArray] = [starts[:, pair].ravel() for pair in own]
        self._sizes: list[IntArray] = [sizes[:, pair].ravel() for pair in own]
        self.tokens = [int(held.sum()) for held in self._sizes]

    def runs(self, member: int) -> tuple[IntArray, IntArray]:
        """Return the starts in the sequence and the sizes of a member's chunks: front and back of each stretch."""
        return self._starts[member], self._sizes[member]

    def calls(self, member: int, source: int) -> list[list[Piece]]:
        """Return the pieces of each kernel call of `member` with the keys of `source`; a call has one kind."""
        calls: list[_Call] = []
        for piece in self._pieces(member, source):
            call = next((one for one in calls if one.takes(piece)), None)
            if call is None:
                call = _Call(self.tokens[member], self.tokens[source], causal=piece.causal)
                calls.append(call)
            call.add(piece)
        return [call.pieces for call in calls]

    def _pieces(self, member: int, source: int) -> Iterator[Piece]:
        """Yield the non-empty part of every area; full areas with the same keys are joined."""
        full: dict[tuple[int, int], list[IntArray]] = {}
        for area in self._areas:
            queries, keys = self._rows(member, area.q_start, area.q_stop), self._rows(source, area.k_start, area.k_stop)
            if area.shape == "full":
                pass
            elif member == source:
                yield from _triangle(queries, keys, area)
                continue
            else:
                queries, keys = self._around_diagonal(area, member, source, queries, keys)
            if len(queries) and len(keys):
                full.setdefault((int(keys[0]), int(keys[-1])), []).append(queries)
        for (first, last), parts in full.items():
            yield Piece(np.concatenate(parts), np.arange(first, last + 1))

    def _around_diagonal(
        self, area: Area, member: int, source: int, queries: IntArray, keys: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the (queries, keys) of a triangular area between two members: a rectangle, see the table above."""
        stretch = int(np.searchsorted(self._cuts, area.q_start, side="right")) - 1
        if source < member:
            middle = self._middle(source, stretch)
            return queries, keys[keys < middle] if area.shape == "causal" else keys[keys >= middle]
        middle = self._middle(member, stretch)
        return queries[queries >= middle] if area.shape == "causal" else queries[queries < middle], keys

    def _middle(self, member: int, stretch: int) -> int:
        """Return the first row of a member's back of a stretch in its buffer."""
        return int(self._sizes[member][: 2 * stretch + 1].sum())

    def _rows(self, member: int, start: int, stop: int) -> IntArray:
        """Return the rows of a member's buffer that hold tokens `start` to `stop` of the sequence."""
        starts, sizes = self.runs(member)
        first, last = (int(np.clip(position - starts, 0, sizes).sum()) for position in (start, stop))
        return np.arange(first, last)


class _Call:
    """Pieces of one kernel call, and the rows they occupy."""

    __slots__ = ("_causal", "_keys", "_queries", "pieces")

    def __init__(self, queries: int, keys: int, *, causal: bool) -> None:
        self._causal = causal
        self._queries: npt.NDArray[np.bool_] = np.zeros(queries, dtype=np.bool_)
        self._keys: npt.NDArray[np.bool_] = np.zeros(keys, dtype=np.bool_)
        self.pieces: list[Piece] = []

    def takes(self, piece: Piece) -> bool:
        """Return whether a piece is of this call's kind and all its rows are free."""
        is_busy = self._queries[piece.queries].any() or self._keys[piece.keys].any()
        return piece.causal == self._causal and not is_busy

    def add(self, piece: Piece) -> None:
        self._queries[piece.queries] = self._keys[piece.keys] = True
        self.pieces.append(piece)


def _triangle(queries: IntArray, keys: IntArray, area: Area) -> Iterator[Piece]:
    """Yield the piece of a triangular area on a member's own rows, if it is not empty."""
    if area.shape == "causal" and len(queries):
        yield Piece(queries, keys, causal=True)
    elif area.shape == "later" and len(queries) > 1:
        yield Piece(queries[-2::-1], keys[:0:-1], causal=True)


def joined_calls(sequences: Sequence[list[list[Piece]]]) -> list[list[tuple[int, Piece]]]:
    """Join the kernel calls of several sequences by number and kind, as (sequence, piece) pairs.

    Causal calls come first, since the first call should cover the most rows.
    """
    joined: dict[tuple[bool, int], list[tuple[int, Piece]]] = {}
    for number, calls in enumerate(sequences):
        for causal in (True, False):
            of_kind = [pieces for pieces in calls if pieces[0].causal == causal]
            for place, pieces in enumerate(of_kind):
                joined.setdefault((not causal, place), []).extend((number, piece) for piece in pieces)
    return [joined[key] for key in sorted(joined)]


# Group of one micro-batch as seen by one of its members: the base of every framework's ring.


class RingMember:
    """One member's place in a ring, and its work there. Cheap to create: no communication.

    Not a dataclass: FSDP2 copies dataclasses among a module's arguments, and calls counted on a copy would be lost.

    Attributes:
        layout: tokens of each member.
        index: this member's index in `ranks`.
        ranks: global ranks of the members, in ring order.
        attention_calls: number of `attention` calls; if it stays 0, the session raises.
    """

    __slots__ = ("attention_calls", "index", "layout", "ranks")

    def __init__(self, layout: ShardLayout, index: int, ranks: tuple[int, ...]) -> None:
        assert len(ranks) == layout.degree, (ranks, layout)
        assert 0 <= index < len(ranks), index
        self.layout = layout
        self.index = index
        self.ranks = ranks
        self.attention_calls = 0

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def ring_layout(self) -> RingLayout:
        """Return the layout of the ring; with Ulysses, only valid for `ring_of_head_group`."""
        assert isinstance(self.layout, RingLayout), self.layout
        return self.layout

    @property
    def ulysses_degree(self) -> int:
        """Return the Ulysses degree: number of members that split the heads of their joint tokens."""
        return self.layout.ulysses_degree

    @property
    def tokens(self) -> int:
        """Return the number of tokens of this member, without padding."""
        return self.layout.tokens(self.index)

    def source(self, hop: int) -> int:
        """Return the member whose keys and values this one holds at `hop`: itself at hops 0 and d."""
        return (self.index - hop) % self.degree

    def work(self, hop: int, *, packed: bool = True) -> tuple[Hop, ...]:
        """Return this member's kernel calls at `hop`; see `RingLayout.hops`."""
        return self.ring_layout.hops(self.index, self.source(hop), packed=packed)

    def check_shapes(self, q: Any, k: Any, v: Any) -> None:
        """Validate that q, k and v [1, heads, tokens, head_dim] of any framework are this member's shard.

        Heads of v may have another size.
        """
        if q.ndim != 4 or q.shape[0] != 1:
            raise RunError(
                f"attention takes q of shape [1, heads, tokens, head_dim], got {tuple(q.shape)}: pack the batch"
            )
        if k.shape[:3] != v.shape[:3] or k.shape[2:] != q.shape[2:] or k.shape[0] != 1 or q.shape[1] % k.shape[1]:
            raise RunError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not fit q {tuple(q.shape)}")
        shared = self.ulysses_degree
        if q.shape[1] % shared or (k.shape[1] % shared and shared % k.shape[1]):
            raise RunError(
                f"the plan shares heads among {shared} ranks, which {q.shape[1]} query heads and {k.shape[1]} "
                "key/value heads cannot be; plan with 'fcp plan --attention ring', or for the model that you train"
            )
        if q.shape[2] < self.tokens:
            raise RunError(
                f"rank {self.ranks[self.index]} holds {self.tokens} tokens of this micro-batch, but q has "
                f"{q.shape[2]}: feed the model the micro-batch's own shard"
            )
