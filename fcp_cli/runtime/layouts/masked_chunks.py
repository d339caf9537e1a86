"""Layout of one masked sequence on a ring: the tokens of each member, and the kernel calls that implement the mask.

A mask cuts a sequence into stretches (`Mask.cuts`), each of which is cut into 2d chunks like a whole causal sequence:
member r holds chunks r and 2d-1-r of every stretch, in token order. Between any two members, an area of the mask then
is one rectangle or triangle of consecutive rows in both buffers:

    area             own keys             keys of an earlier member     keys of a later member
    full, [q, k]     q x k                q x k                         q x k
    causal           triangle             all x fronts                  backs x all
    keys after own   triangle, reversed   all x backs                   fronts x all

A triangle of keys after a query's own is causal if queries and keys are read backwards, so kernels need no special
mask.

A kernel call must not contain a query or key twice, since results are merged and gradients added row by row. Each piece
joins the first call in which its rows are free. A mask lists its areas in rounds, which bound the number of calls of
each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray
from fcp_cli.masks import Area, Mask


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
