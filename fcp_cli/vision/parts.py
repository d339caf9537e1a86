"""The pieces of images and videos that an encoder can run separately, and their assignment to the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import RunError
from fcp_cli.masks import CAUSAL, Mask

if TYPE_CHECKING:
    from torch import Tensor


Kind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelsRead:
    """Rows that were asked for together.

    Attributes:
        rows: [rows, ...] each.
        problem: why a picture could not be read, whose rows are blank then; None if all could.
    """

    rows: Sequence[Tensor]
    problem: str | None = None


@runtime_checkable
class PixelReader(Protocol):
    """Pictures of one kind of a sequence that are read ahead of time, elsewhere."""

    def begin(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], PixelsRead]:
        """Start reading several ranges of rows at once; return a function that waits for them."""


Pixels: TypeAlias = "Tensor | Callable[[int, int], Tensor] | PixelReader"
"""Pixels from a processor, [rows, ...], or a reader of rows start to stop."""


@dataclass(frozen=True, slots=True)
class PixelRows:
    """Lazy reader of rows `start` to `stop` of some pixels."""

    pixels: Pixels
    start: int
    stop: int

    def __call__(self) -> Tensor:
        """Return the rows."""
        if isinstance(self.pixels, PixelReader):
            read = self.pixels.begin([(self.start, self.stop)])()
            if read.problem is not None:
                raise RunError(read.problem)
            return read.rows[0]
        return self.pixels(self.start, self.stop) if callable(self.pixels) else self.pixels[self.start : self.stop]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualPart:
    """The smallest piece of an image or a video that the encoder can run by itself: an image, a pair of frames, a tile.

    Attributes:
        kind: determines the placeholder of its tokens.
        start_token: position of the first of its tokens in the sequence.
        num_tokens: how many it has, all together.
        work: the work of the encoder for it, in any unit that all parts share.
        grid: height and width in patches.
        pixels: gives the encoder's input for it, [patches, ...]; called ahead of time in a background thread, and only
            on the rank that encodes it.
    """

    kind: Kind
    start_token: int
    num_tokens: int
    work: float
    grid: tuple[int, int]
    pixels: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualSequence:
    """One sequence with images or videos, as `fetch` returns it.

    Attributes:
        tokens: [tokens] ids, with placeholders of visual embeddings.
        labels: [tokens] as Hugging Face data sets have them, or None to learn every token.
        parts: the pieces of its images and videos, in the order of their tokens; may be empty.
        position_ids: [axes, tokens] if the model's positions are not 0, 1, 2, ...
        mask: the mask of its tokens; images with bidirectional attention are `masks.segments`.
    """

    tokens: Any
    labels: Any = None
    parts: tuple[VisualPart, ...] = ()
    position_ids: IntArray | None = None
    mask: Mask = CAUSAL


def begin_reading(parts: Sequence[VisualPart]) -> Callable[[], PixelsRead]:
    """Start reading the pixels of one sequence's parts; return a function per part that waits for them, in order."""
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
    """Return [parts] the member that encodes each part; the same on every rank.

    The heaviest first, each to the least loaded member: the most loaded member then has at most 4/3 - 1/(3 members) of
    the least possible (Graham, 1969). Then its parts and those of another member are divided again between the
    two, as evenly as can be, as long as that lowers the larger load.

    Args:
        work: the work of each part.
        members: who may encode any part.
        homes: [parts] the members that hold a part's tokens: they keep at most their even share, so that
            fewer embeddings travel. None: all members alike.
    """
    weights = np.asarray(work, dtype=np.float64)
    encoders = _largest_first(work, members, homes)
    loads = np.bincount(encoders, weights=weights, minlength=members)
    for _ in range(min(_MOST_ROUNDS_PER_MEMBER * members, _MOST_TRIES // members)):
        heaviest = int(loads.argmax())
        if loads[heaviest] <= _EVEN_ENOUGH * loads.mean():
            break
        # An improvement below rounding could be undone in the next round, endlessly.
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


_EVEN_ENOUGH = 1.01  # largest over mean load at which dividing again ends
_MOST_ROUNDS_PER_MEMBER = 8
_MOST_TRIES = 1 << 15  # pairs of members whose parts are divided again: a second of a loader's time
_LEVELS = 4096  # a half is sought among so many sums


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
    """Choose the weights that come closest to half of their sum; they are rounded to 1/4096 of it.

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
