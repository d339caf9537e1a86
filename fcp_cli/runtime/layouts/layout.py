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
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.masks import Mask
from fcp_cli.runtime.layouts.masked_chunks import MaskedChunks, Piece, joined_calls

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

    heads_degree = 1
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
        degree: number of members, a multiple of `heads_degree`.
        heads_degree: Ulysses degree, >= 2.
        masks: as for the ring.
    """

    __slots__ = ("_ring", "_starts", "heads_degree")

    def __init__(self, lengths: tuple[int, ...], degree: int, heads_degree: int, masks: tuple[Mask, ...] = ()) -> None:
        assert degree % heads_degree == 0, (degree, heads_degree)
        self.heads_degree = heads_degree
        self._ring = shard_layout(lengths, degree // heads_degree, *([1, masks] if masks else [])).ring
        held = np.array([self._ring.tokens(place) for place in range(self._ring.degree)], dtype=np.int64)
        run, extra = np.divmod(held, heads_degree)
        sizes = run[:, None] + (np.arange(heads_degree) < extra[:, None])  # [sets, u]
        self._starts: list[int] = (np.cumsum(sizes, axis=1) - sizes).ravel().tolist()
        super().__init__(lengths, degree, masks, sizes.ravel().tolist())

    @property
    def ring(self) -> RingLayout:
        return self._ring

    def position_ids(self, index: int) -> IntArray:
        return self._own_run(index, self._ring.position_ids(index // self.heads_degree))

    def index(self, index: int) -> IntArray:
        return self._own_run(index, self._ring.index(index // self.heads_degree))

    def _own_run(self, index: int, of_set: IntArray) -> IntArray:
        return of_set[self._starts[index] : self._starts[index] + self._tokens[index]]


@lru_cache(maxsize=CACHED_LAYOUTS)
def shard_layout(
    lengths: tuple[int, ...], degree: int, heads_degree: int = 1, masks: tuple[Mask, ...] = ()
) -> ShardLayout:
    """Return the layout of a pack on a group; cached, so micro-batches of equal shape share it.

    Args:
        lengths: tokens of each sequence.
        degree: number of members of the group.
        heads_degree: Ulysses degree: consecutive members that split the heads; divides `degree`.
        masks: mask of each sequence; empty if all are causal.
    """
    if all(mask.is_causal for mask in masks):
        masks = ()
    if heads_degree > 1:
        return UlyssesLayout(lengths, degree, heads_degree, masks)
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
