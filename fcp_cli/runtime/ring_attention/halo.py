"""Halo exchange: receive the rows around every chunk of a shard, and return their gradients to their owners.

A layer that looks back a few tokens, such as sliding-window attention, needs the last rows before each of a member's
chunks, its *halo*, but not the rest of the pack. If a mask lets a span of tokens attend bidirectionally, the halo
includes the span's rows after the chunk. Consecutive chunks are held by ring neighbours, so halos use the ring's own
connections: in round n every member sends the next member the rows that it needs from the member n places before it,
then the previous member those from the member n places behind it.

    front chunks  0 -> 1 -> .. -> d-1         back chunks  d -> d+1 -> .. -> 2d-1
    members       0 -> 1 -> .. -> d-1                      d-1 -> d-2 -> .. -> 0

If chunks are shorter than the halo, a second round forwards the rows of the first, and so on. Members between a row's
owner and its reader hold chunks in between and read the row, too, so each row arrives once, and only where it is read.
Masks are the exception: they may cut sequences so short that a member only forwards rows. Backward runs the rounds in
reverse order and direction, and sums gradients on the way.

All sizes follow from the layout. Every round is one send and one receive for fronts, then one of each for backs, in the
same order on all members, so it cannot deadlock (`transport`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.masks import Spans
from fcp_cli.runtime.communication.transport import GroupChannel, Handle, Waits
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS, RingLayout, Rows, Runs
from fcp_cli.runtime.ring_attention.rows import add_to_rows, rows_at, take


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
