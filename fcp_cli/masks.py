"""Attention masks within one sequence: causal attention, and the additions of models of images and videos.

A mask is a small value that a manifest derives `eta` from and that a ring follows:

    causal                token q sees tokens 0..q; the default of a sequence
    full()                every token sees every other
    prefix(p)             the first p tokens see each other, the rest is causal
    segments(spans)       causal, and tokens of one span (an image, as in Gemma 3) see each other; or in layers with
                          windows alone, as in Gemma 4
    chunk_pairs(sizes)    teacher forcing of a video in chunks: clean tokens of all chunks, then as many noisy ones; a
                          clean chunk sees the clean chunks up to itself, a noisy one those before it, and itself

Example: `segments([(1, 4)])` and `chunk_pairs([1, 2])` on 6 tokens; queries are rows, and `x` is seen:

    x . . . . .        x . . . . .      clean 0
    x x x x . .        x x x . . .      clean 1
    x x x x . .        x x x . . .
    x x x x . .        . . . x . .      noisy 0
    x x x x x .        x . . . x x      noisy 1
    x x x x x x        x . . . x x
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import IntArray
from fcp_cli.errors import MaskError
from fcp_cli.words import counted

Shape: TypeAlias = Literal["full", "causal", "later"]
"""Pairs of an area: all, keys up to the query's own, or keys after it; the last two areas are squares."""

# A span of at least such a part of its sequence is shared out among members by itself; see `Spans.cuts`.
_WIDE_PART = 16
_WHOLE = 2**31 - 1  # the longest sequence there is


@dataclass(frozen=True, slots=True)
class Area:
    """A part of a mask: pairs of queries `q_start` to `q_stop` and keys `k_start` to `k_stop` of one sequence."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    shape: Shape = "full"

    @property
    def pairs(self) -> int:
        """Return how many pairs it lets through."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        if self.shape == "full":
            return queries * keys
        return queries * (queries + 1) // 2 if self.shape == "causal" else queries * (queries - 1) // 2


@dataclass(frozen=True, slots=True)
class Spans:
    """Causal attention in which the tokens of each span see each other, too.

    Attributes:
        spans: (start, stop) of each, ascending, of 2 tokens at least; spans beyond a sequence have no meaning.
        windows_only: layers without windows are causal.
    """

    spans: tuple[tuple[int, int], ...] = ()
    windows_only: bool = False

    can_be_cut = has_windows = True

    @property
    def is_causal(self) -> bool:
        return not self.spans

    @property
    def plans_as_causal(self) -> bool:
        """Return whether its layout and the work of full attention are those of a causal sequence."""
        return self.windows_only or self.is_causal

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers that identify the mask among others of its kind."""
        return tuple(end for span in self.spans for end in span)

    def misfit(self, length: int) -> str:
        """Say why a sequence of so many tokens cannot have the mask; "" where it can."""
        last = self.spans[-1][1] if self.spans else 0
        return "" if last <= length or last == _WHOLE else f"its mask has a span up to token {last}"

    def pairs(self, length: int) -> int:
        """Return how many pairs of a query and a key full attention over `length` tokens has."""
        return length * (length + 1) // 2 + sum(
            (stop - start) * (stop - start - 1) // 2 for start, stop in self._spans_of_full_layers(length)
        )

    def cuts(self, length: int) -> tuple[int, ...]:
        """Return where the sequence falls into stretches, 0 and `length` among them, so that a zig-zag of each is even.

        Queries of a span see equally many keys, those of other tokens one more each: either way the first and the last
        chunk of a stretch weigh as much together as any two that lie between. Spans of less than a 16th of the
        sequence stay within a stretch, since they add less than that to any query's keys.
        """
        wide = (span for span in self._spans_of_full_layers(length) if (span[1] - span[0]) * _WIDE_PART >= length)
        return tuple(sorted({0, length, *(end for span in wide for end in span)}))

    def areas(self, length: int, cuts: Sequence[int] | None = None) -> tuple[Area, ...]:
        """Return disjoint areas of full attention: those on the diagonal, then those below it.

        Args:
            length: tokens of the sequence.
            cuts: those of `cuts`, the default, or without some of them: no causal area reaches over one.
        """
        cuts = self.cuts(length) if cuts is None else cuts
        spans, stretches = list(self._spans_of_full_layers(length)), list(pairwise(cuts))
        found = [Area(*one, *one, "full" if one in spans else "causal") for one in stretches]
        found += (Area(*span, *span, "later") for span in spans if span not in stretches)
        return (*found, *_below(cuts))

    def position_ids(self, length: int) -> IntArray:
        """Return [length] the position of each token for its embedding."""
        return np.arange(length, dtype=np.int64)

    def eta(self, length: int) -> float:
        """Return the mask factor of a sequence; see `eta_of`."""
        return eta_of(self.pairs(length), length)

    def seen_both_ways(self, length: int) -> Iterator[tuple[int, int]]:
        """Return the spans as far as they lie in the sequence."""
        for start, stop in self.spans:
            if min(stop, length) - start > 1:
                yield start, min(stop, length)

    def _spans_of_full_layers(self, length: int) -> Iterator[tuple[int, int]]:
        return iter(()) if self.windows_only else self.seen_both_ways(length)


@dataclass(frozen=True, slots=True)
class ChunkPairs:
    """Chunks of clean tokens, then chunks of as many noisy ones, each of which sees the clean ones before, and itself.

    Attributes:
        sizes: tokens of each clean chunk, and of its noisy one.
    """

    sizes: tuple[int, ...]

    is_causal = plans_as_causal = windows_only = can_be_cut = has_windows = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers that identify the mask among others of its kind."""
        return self.sizes

    def misfit(self, length: int) -> str:
        """Say why a sequence of so many tokens cannot have the mask; "" where it can."""
        wanted = 2 * sum(self.sizes)
        return "" if wanted == length else f"its mask has chunk pairs of {wanted} tokens, which cannot be cut"

    def pairs(self, length: int) -> int:
        """Return how many pairs of a query and a key the sequence has."""
        return 2 * sum(size * stop for size, stop in zip(self.sizes, accumulate(self.sizes), strict=True))

    def cuts(self, length: int) -> tuple[int, ...]:
        """Return where the sequence falls into stretches: noisy tokens lie with their clean ones, cut as these are."""
        return 0, length // 2, length

    def areas(self, length: int, cuts: Sequence[int] | None = None) -> tuple[Area, ...]:
        """Return disjoint areas that make up the mask; `cuts` are as for `Spans.areas` and change nothing."""
        half, bounds = length // 2, list(accumulate(self.sizes, initial=0))
        found = [Area(a + shift, b + shift, a + shift, b + shift) for shift in (0, half) for a, b in pairwise(bounds)]
        for clean in _below(bounds):
            noisy = Area(clean.q_start + half, clean.q_stop + half, clean.k_start, clean.k_stop)
            found += (clean, noisy)
        return tuple(found)

    def position_ids(self, length: int) -> IntArray:
        """Return [length] the position of each token for its embedding: noisy tokens have those of their clean ones."""
        return np.tile(np.arange(length // 2, dtype=np.int64), 2)

    def eta(self, length: int) -> float:
        """Return the mask factor of a sequence; see `eta_of`."""
        return eta_of(self.pairs(length), length)


Mask: TypeAlias = Spans | ChunkPairs

CAUSAL = Spans()

MASK_COLUMN: Final = "mask"
"""Column of a manifest: the numbers of each sequence's mask; the header says of which kind it is."""

MaskKind = Literal["full", "prefix", "segments", "types", "pairs"]
"""Fields from which the masks of a data set are built: see `mask_of`."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskRows:
    """The masks of all sequences of a data set.

    Attributes:
        kind: kind of all masks.
        offsets: [rows + 1] start of each row in `numbers`; [0] for `full` masks, which have no numbers.
        numbers: numbers of all rows, concatenated.
    """

    kind: MaskKind
    offsets: IntArray
    numbers: IntArray

    def mask(self, row: int) -> Mask:
        """Return the mask of a row."""
        if self.kind == "full":
            return full()
        return mask_of(self.kind, self.numbers[self.offsets[row] : self.offsets[row + 1]].tolist())

    def scaled(self, factor: float) -> MaskRows:
        """Return the masks of sequences that are as much shorter; each chunk of a pair keeps a token."""
        numbers = np.floor(self.numbers * factor).astype(np.int64)
        return MaskRows(self.kind, self.offsets, np.maximum(numbers, 1) if self.kind == "pairs" else numbers)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedSequence:
    """One sequence with a mask, as `fetch` returns it.

    Attributes:
        tokens: [tokens] ids.
        mask: the mask of the tokens.
        labels: [tokens] in the form of Hugging Face data sets, or None to train on every token.
        own_labels: whether each token predicts its own label, as in masked and diffusion language models, instead of
            the next token's.
        position_ids: [axes, tokens] positions, or None for those of the mask.
    """

    tokens: Any
    mask: Mask
    labels: Any = None
    own_labels: bool = False
    position_ids: IntArray | None = None


def eta_of(pairs: int, length: int) -> float:
    """Return the mask factor of a number of pairs: 0 if causal, 1 for all pairs, below 0 for fewer than causal.

    A causal sequence of L tokens has L (L + 1) / 2 pairs, a full one L (L - 1) / 2 more, which is the unit of eta.
    """
    return 0.0 if length < 2 else (pairs - length * (length + 1) // 2) / (length * (length - 1) // 2)


def full() -> Mask:
    """Return the mask of a sequence whose tokens all see each other."""
    return Spans(((0, _WHOLE),))


def prefix(tokens: int) -> Mask:
    """Return the mask of a sequence whose first `tokens` see each other, while the rest is causal.

    Raises:
        MaskError: `tokens` is below 0.
    """
    if tokens < 0:
        raise MaskError(f"a prefix has {tokens} tokens; it has 0 or more")
    return segments([(0, tokens)])


def segments(spans: Iterable[Sequence[int]], *, windows_only: bool = False) -> Mask:
    """Return the mask of a causal sequence in which tokens of the same span see each other both ways.

    Args:
        spans: (start, stop) of each, ascending and apart, `stop` not included.
        windows_only: layers without windows are causal.

    Raises:
        MaskError: a span ends before it starts, or starts before the one before it ends.
    """
    given = [tuple(map(int, span)) for span in spans]
    end = 0
    for span in given:
        if len(span) != 2 or not end <= span[0] <= span[1]:
            raise MaskError(f"span {span} of a mask does not follow token {end}; spans are (start, stop), ascending")
        end = span[1]
    return Spans(tuple((start, stop) for start, stop in given if stop - start > 1), windows_only)


def chunk_pairs(sizes: Iterable[int]) -> Mask:
    """Return the mask of teacher forcing: clean chunks of these sizes, then noisy ones of the same sizes.

    Raises:
        MaskError: there is no chunk, or one without tokens.
    """
    given = tuple(map(int, sizes))
    if not given or min(given) < 1:
        raise MaskError(f"chunks of {list(given)} tokens; a mask of pairs has chunks of at least 1 token each")
    return ChunkPairs(given)


def token_types(types: Iterable[int], *, windows_only: bool = False) -> Mask:
    """Return the mask that Gemma 3 has by its `token_type_ids`: tokens of type 1 that follow each other, which are
    those of an image, see each other both ways; the rest is causal, and so are all in layers without windows if
    `windows_only`.
    """
    is_image = np.fromiter((value == 1 for value in types), dtype=np.int8)
    ends = np.flatnonzero(np.diff(is_image, prepend=0, append=0))
    return segments(ends.reshape(-1, 2).tolist(), windows_only=windows_only)


def mask_of(kind: MaskKind, numbers: Sequence[int]) -> Mask:
    """Return the mask of a kind with these numbers; `full` has no numbers, nor have causal masks of other kinds.

    Raises:
        MaskError: no such mask exists.
    """
    if kind == "full":
        return full()
    if not numbers:
        return CAUSAL
    if kind == "prefix":
        return prefix(numbers[0])
    return chunk_pairs(numbers) if kind == "pairs" else segments(zip(numbers[::2], numbers[1::2], strict=True))


def of_matrix(seen: npt.NDArray[np.bool_]) -> Mask:
    """Return the mask of a sequence in which query i attends to key j if `seen[i, j]`.

    Raises:
        MaskError: the mask is not causal attention with bidirectional spans.
    """
    tokens = len(seen)
    stops = tokens - np.argmax(seen[:, ::-1], axis=1)  # behind the last key of each query
    if not (seen == (np.arange(tokens) < stops[:, None])).all():
        query = int(np.flatnonzero((seen != (np.arange(tokens) < stops[:, None])).any(axis=1))[0])
        raise MaskError(f"token {query} does not see all tokens up to the last that it sees")
    starts = np.flatnonzero(np.diff(stops, prepend=-1))
    ends = np.append(starts[1:], tokens)
    if not np.array_equal(stops[starts], ends):
        query = int(starts[np.flatnonzero(stops[starts] != ends)[0]])
        raise MaskError(f"token {query} sees up to token {int(stops[query]) - 1}, which does not see it both ways")
    return segments(np.stack((starts, ends), axis=1).tolist())


def described(mask: Mask) -> str:
    """Return a mask in a few words, for messages."""
    if isinstance(mask, ChunkPairs):
        return f"{counted(len(mask.sizes), 'pair')} of chunks"
    if mask.is_causal:
        return "causal"
    spans = ", ".join(f"{start} to {'the end' if stop == _WHOLE else stop}" for start, stop in mask.spans[:3])
    where = ", in windows alone" if mask.windows_only else ""
    return f"spans {spans}{f' and {len(mask.spans) - 3} more' if len(mask.spans) > 3 else ''}{where}"


def _below(bounds: Sequence[int]) -> Iterator[Area]:
    """Return areas of all blocks of later queries and earlier keys, where `bounds` cut both into blocks.

    n blocks are halved, the later half sees the earlier one, and both are halved again: log2(n) rounds, in none of
    which a query or a key takes part twice. The order is that of the rounds.
    """
    halves = [(0, len(bounds) - 1)]
    for first, last in halves:  # grows while it is read
        middle = (first + last + 1) // 2
        if last - first > 1:
            yield Area(bounds[middle], bounds[last], bounds[first], bounds[middle])
            halves += [(first, middle), (middle, last)]
