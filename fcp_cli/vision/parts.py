"""Image and video parts that an encoder can run separately, and their assignment to ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fcp_cli.errors import RunError
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.masks import CAUSAL, Mask

if TYPE_CHECKING:
    from torch import Tensor


Kind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelsRead:
    """Pixel rows that were read together.

    Attributes:
        rows: one tensor [rows, ...] per requested range.
        problem: why a picture could not be read, in which case its rows are blank; or None.
    """

    rows: Sequence[Tensor]
    problem: str | None = None


@runtime_checkable
class PixelReader(Protocol):
    """Reads the images or the videos of a sequence in the background."""

    def begin(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], PixelsRead]:
        """Start reading several row ranges; return a function that waits for them."""


Pixels: TypeAlias = "Tensor | Callable[[int, int], Tensor] | PixelReader"
"""Pixels from a processor, [rows, ...], or a function or reader that returns a range of rows."""


@dataclass(frozen=True, slots=True)
class PixelRows:
    """Lazily reads pixel rows [`start`, `stop`)."""

    pixels: Pixels
    start: int
    stop: int

    def __call__(self) -> Tensor:
        if isinstance(self.pixels, PixelReader):
            read = self.pixels.begin([(self.start, self.stop)])()
            if read.problem is not None:
                raise RunError(read.problem)
            return read.rows[0]
        return self.pixels(self.start, self.stop) if callable(self.pixels) else self.pixels[self.start : self.stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualPart:
    """The smallest piece that the encoder can run by itself: an image, a pair of frames, or a tile.

    Attributes:
        kind: image or video; determines the placeholder token.
        start_token: position of its first token in the sequence.
        num_tokens: number of its tokens, which are contiguous.
        work: encoder work, in any unit common to all parts.
        grid: height and width in patches.
        pixels: returns its encoder input [patches, ...]; called in a background thread, only on the encoding rank.
    """

    kind: Kind
    start_token: int
    num_tokens: int
    work: float
    grid: tuple[int, int]
    pixels: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualSequence:
    """A sequence with images or videos, as `fetch` returns it.

    Attributes:
        tokens: [tokens] ids, with placeholders for visual embeddings.
        labels: [tokens] as in Hugging Face data sets, or None to train every token.
        parts: parts of its images and videos, in token order; may be empty.
        position_ids: [axes, tokens] if the model's positions are not 0, 1, 2, ...
        mask: attention mask; use `masks.segments` for images with bidirectional attention.
    """

    tokens: Any
    labels: Any = None
    parts: tuple[VisualPart, ...] = ()
    position_ids: IntArray | None = None
    mask: Mask = CAUSAL


def begin_reading(parts: Sequence[VisualPart]) -> Callable[[], PixelsRead]:
    """Start reading the pixels of a sequence's parts; return a function per part that waits for them, in order."""
    together: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        if isinstance(part.pixels, PixelRows) and isinstance(part.pixels.pixels, PixelReader):
            together.setdefault(id(part.pixels.pixels), []).append(number)
    begun = []
    for numbers in together.values():
        wanted = [part.pixels for part in (parts[number] for number in numbers) if isinstance(part.pixels, PixelRows)]
        reader = wanted[0].pixels
        assert isinstance(reader, PixelReader)
        begun.append((numbers, reader.begin([(rows.start, rows.stop) for rows in wanted])))

    def wait() -> PixelsRead:
        found: dict[int, Tensor] = {}
        problem = None
        for numbers, finish in begun:
            read = finish()
            found.update(zip(numbers, read.rows, strict=True))
            problem = problem or read.problem
        rows = [found[number] if number in found else part.pixels() for number, part in enumerate(parts)]
        return PixelsRead(rows=rows, problem=problem)

    return wait


def balanced_encoders(work: Sequence[float], members: int, homes: Sequence[range] | None = None) -> IntArray:
    """Return the group member that encodes each part, [parts]; the same on every rank.

    Parts go, heaviest first, to the least loaded member: the largest load is then at most 4/3 - 1/(3 members) times the
    optimum (Graham, 1969). Then parts of the most loaded member and another are repeatedly redistributed between the
    two, as long as that lowers the larger load.

    Args:
        work: the work of each part.
        members: size of the group; each member may encode any part.
        homes: [parts] members that hold a part's tokens, preferred up to an even share, so that fewer embeddings are
            sent; None: no preference.
    """
    weights = np.asarray(work, dtype=np.float64)
    encoders = _largest_first(work, members, homes)
    loads = np.bincount(encoders, weights=weights, minlength=members)
    for _ in range(min(_MOST_ROUNDS_PER_MEMBER * members, _MOST_TRIES // members)):
        heaviest = int(loads.argmax())
        if loads[heaviest] <= _EVEN_ENOUGH * loads.mean():
            break
        # An improvement below rounding error could be undone in the next round, forever.
        least, best = loads[heaviest] * (1 - 1e-9), None
        for other in np.flatnonzero(np.arange(members) != heaviest).tolist():
            both = np.flatnonzero((encoders == heaviest) | (encoders == other))
            half = both[_half_of(weights[both])]
            larger = max(weights[half].sum(), weights[both].sum() - weights[half].sum())
            if larger < least:
                least, best = larger, (other, both, half)
        if best is None:
            break
        other, both, half = best
        encoders[both] = heaviest
        encoders[half] = other
        loads = np.bincount(encoders, weights=weights, minlength=members)
    return encoders


_EVEN_ENOUGH = 1.01  # ratio of largest to mean load at which redistribution ends
_MOST_ROUNDS_PER_MEMBER = 8
_MOST_TRIES = 1 << 15  # limit on redistributed pairs of members: about a second
_LEVELS = 4096  # resolution of the sums when halving


def _largest_first(work: Sequence[float], members: int, homes: Sequence[range] | None) -> IntArray:
    falling = sorted(range(len(work)), key=lambda i: -work[i])
    encoders = np.empty(len(work), dtype=np.int64)
    loads = [0.0] * members
    if homes is not None:
        even, away = sum(work) / members, []
        for part in falling:
            member = min(homes[part], key=loads.__getitem__)
            if loads[member] + work[part] > even * (1 + 1e-9):
                away.append(part)
                continue
            encoders[part] = member
            loads[member] += work[part]
        falling = away
    heap = [(load, member) for member, load in enumerate(loads)]
    heapify(heap)
    for part in falling:
        load, member = heap[0]
        encoders[part] = member
        heapreplace(heap, (load + work[part], member))
    return encoders


def _half_of(weights: FloatArray) -> list[int]:
    """Choose weights that sum to about half of the total, each rounded to 1/4096 of it.

    Bit s of `sums[n]` is set if some of the first n weights add up to s, so a shift adds a weight to all sums.
    """
    rounded = np.rint(weights * (_LEVELS / weights.sum())).astype(np.int64).tolist()
    sums = [1]
    for weight in rounded:
        sums.append(sums[-1] | sums[-1] << weight)
    wanted = (sums[-1] & (2 << sum(rounded) // 2) - 1).bit_length() - 1
    chosen = []
    for position in range(len(rounded) - 1, -1, -1):
        if not sums[position] >> wanted & 1:
            chosen.append(position)
            wanted -= rounded[position]
    return chosen
