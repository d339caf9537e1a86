"""Attention masks within a sequence: causal, and variants for models of images and videos.

A mask is a small value, from which a manifest derives `eta` and which a ring applies:

    causal                token q attends to tokens 0..q; the default
    full()                every token attends to every token
    prefix(p)             the first p tokens attend to each other, the rest is causal
    segments(spans)       causal, plus bidirectional attention within each span (an image, as in Gemma 3), in all
                          layers or only in windowed layers (as in Gemma 4)
    chunk_pairs(sizes)    teacher forcing of a video in chunks: clean tokens of all chunks, then as many noisy ones; a
                          clean chunk attends to clean chunks up to itself, a noisy one to earlier clean ones and itself

Example: `segments([(1, 4)])` and `chunk_pairs([1, 2])` on 6 tokens; rows are queries, `x` are allowed pairs:

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

from fcp_cli.errors import MaskError
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.words import counted

Shape: TypeAlias = Literal["full", "causal", "later"]
"""Pairs of an area: all, keys up to the query, or keys after the query; the last two are squares."""

# A span of at least 1/16 of its sequence is distributed among ring members separately; see `Spans.cuts`.
_WIDE_PART = 16
_WHOLE = 2**31 - 1  # maximum sequence length


@dataclass(frozen=True, slots=True)
class Area:
    """A block of a mask: queries [`q_start`, `q_stop`) and keys [`k_start`, `k_stop`) of a sequence."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    shape: Shape = "full"

    @property
    def pairs(self) -> int:
        """Number of allowed pairs."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        if self.shape == "full":
            return queries * keys
        return queries * (queries + 1) // 2 if self.shape == "causal" else queries * (queries - 1) // 2


@dataclass(frozen=True, slots=True)
class Spans:
    """Causal attention, plus bidirectional attention within each span.

    Attributes:
        spans: ascending (start, stop), of at least 2 tokens each; parts beyond the sequence are ignored.
        windows_only: whether spans apply only to windowed layers.
    """

    spans: tuple[tuple[int, int], ...] = ()
    windows_only: bool = False

    can_be_cut = has_windows = True

    @property
    def is_causal(self) -> bool:
        return not self.spans

    @property
    def plans_as_causal(self) -> bool:
        """Whether layout and full-attention work are those of a causal sequence."""
        return self.windows_only or self.is_causal

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that define the mask within its kind."""
        return tuple(end for span in self.spans for end in span)

    def misfit(self, length: int) -> str:
        """Return why a sequence of this length cannot have the mask, or ""."""
        last = self.spans[-1][1] if self.spans else 0
        return "" if last <= length or last == _WHOLE else f"its mask has a span up to token {last}"

    def pairs(self, length: int) -> int:
        """Return the number of query-key pairs of full attention over `length` tokens."""
        return length * (length + 1) // 2 + sum(
            (stop - start) * (stop - start - 1) // 2 for start, stop in self._spans_of_full_layers(length)
        )

    def cuts(self, length: int) -> tuple[int, ...]:
        """Return the boundaries of stretches, including 0 and `length`, within which a zig-zag layout is balanced.

        Queries in a span see equally many keys; other queries see one more key each. In both cases, the first and last
        chunk of a stretch together weigh as much as any such pair further inside. Spans shorter than 1/16 of the
        sequence do not form stretches: they add less than that to a query's keys.
        """
        wide = (span for span in self._spans_of_full_layers(length) if (span[1] - span[0]) * _WIDE_PART >= length)
        return tuple(sorted({0, length, *(end for span in wide for end in span)}))

    def areas(self, length: int, cuts: Sequence[int] | None = None) -> tuple[Area, ...]:
        """Return disjoint areas of full attention: first those on the diagonal, then those below it.

        Args:
            length: tokens of the sequence.
            cuts: a subset of `cuts`, by default all; no causal area crosses one.
        """
        cuts = self.cuts(length) if cuts is None else cuts
        spans, stretches = list(self._spans_of_full_layers(length)), list(pairwise(cuts))
        found = [Area(*one, *one, "full" if one in spans else "causal") for one in stretches]
        found += (Area(*span, *span, "later") for span in spans if span not in stretches)
        return (*found, *_below(cuts))

    def position_ids(self, length: int) -> IntArray:
        """Return the position of each token, [length]."""
        return np.arange(length, dtype=np.int64)

    def eta(self, length: int) -> float:
        """Return the mask factor; see `eta_of`."""
        return eta_of(self.pairs(length), length)

    def seen_both_ways(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield the spans, truncated to the sequence."""
        for start, stop in self.spans:
            if min(stop, length) - start > 1:
                yield start, min(stop, length)

    def _spans_of_full_layers(self, length: int) -> Iterator[tuple[int, int]]:
        return iter(()) if self.windows_only else self.seen_both_ways(length)


@dataclass(frozen=True, slots=True)
class ChunkPairs:
    """Clean chunks, then noisy chunks of the same sizes, which attend to earlier clean chunks and themselves.

    Attributes:
        sizes: tokens of each clean chunk, and of its noisy counterpart.
    """

    sizes: tuple[int, ...]

    is_causal = plans_as_causal = windows_only = can_be_cut = has_windows = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers that define the mask within its kind."""
        return self.sizes

    def misfit(self, length: int) -> str:
        """Return why a sequence of this length cannot have the mask, or ""."""
        wanted = 2 * sum(self.sizes)
        return "" if wanted == length else f"its mask has chunk pairs of {wanted} tokens, which cannot be truncated"

    def pairs(self, length: int) -> int:
        """Return the number of query-key pairs."""
        return 2 * sum(size * stop for size, stop in zip(self.sizes, accumulate(self.sizes), strict=True))

    def cuts(self, length: int) -> tuple[int, ...]:
        """Return the boundaries of stretches: clean and noisy half, so that both are split alike."""
        return 0, length // 2, length

    def areas(self, length: int, cuts: Sequence[int] | None = None) -> tuple[Area, ...]:
        """Return disjoint areas that make up the mask; `cuts` has no effect."""
        half, bounds = length // 2, list(accumulate(self.sizes, initial=0))
        found = [Area(a + shift, b + shift, a + shift, b + shift) for shift in (0, half) for a, b in pairwise(bounds)]
        for clean in _below(bounds):
            noisy = Area(clean.q_start + half, clean.q_stop + half, clean.k_start, clean.k_stop)
            found += (clean, noisy)
        return tuple(found)

    def position_ids(self, length: int) -> IntArray:
        """Return the position of each token, [length]; noisy tokens have those of their clean ones."""
        return np.tile(np.arange(length // 2, dtype=np.int64), 2)

    def eta(self, length: int) -> float:
        """Return the mask factor; see `eta_of`."""
        return eta_of(self.pairs(length), length)


Mask: TypeAlias = Spans | ChunkPairs

CAUSAL = Spans()

MASK_COLUMN: Final = "mask"
"""Manifest column with the numbers of each sequence's mask; its kind is in the header."""

MaskKind = Literal["full", "prefix", "segments", "types", "pairs"]
"""Kinds of masks of a data set; see `mask_of`."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskRows:
    """Masks of all sequences of a data set.

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
        """Return the masks for sequences scaled by `factor`; each chunk of a pair keeps at least a token."""
        numbers = np.floor(self.numbers * factor).astype(np.int64)
        return MaskRows(self.kind, self.offsets, np.maximum(numbers, 1) if self.kind == "pairs" else numbers)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedSequence:
    """A sequence with a mask, as `fetch` returns it.

    Attributes:
        tokens: [tokens] ids.
        mask: attention mask.
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
    """Return the mask factor of a number of pairs: 0 for causal, 1 for full, negative for fewer than causal.

    A causal sequence of L tokens has L (L + 1) / 2 pairs; a full one has L (L - 1) / 2 more, the unit of eta.
    """
    return 0.0 if length < 2 else (pairs - length * (length + 1) // 2) / (length * (length - 1) // 2)


def full() -> Mask:
    """Return a full bidirectional mask."""
    return Spans(((0, _WHOLE),))


def prefix(tokens: int) -> Mask:
    """Return a causal mask with a bidirectional prefix of `tokens` tokens.

    Raises:
        MaskError: `tokens` is below 0.
    """
    if tokens < 0:
        raise MaskError(f"a prefix has {tokens} tokens; it has 0 or more")
    return segments([(0, tokens)])


def segments(spans: Iterable[Sequence[int]], *, windows_only: bool = False) -> Mask:
    """Return a causal mask with bidirectional attention within each span.

    Args:
        spans: half-open (start, stop), ascending and disjoint.
        windows_only: whether spans apply only to windowed layers.

    Raises:
        MaskError: spans are reversed, overlapping or not ascending.
    """
    given = [tuple(map(int, span)) for span in spans]
    end = 0
    for span in given:
        if len(span) != 2 or not end <= span[0] <= span[1]:
            raise MaskError(f"span {span} of a mask does not follow token {end}; spans are (start, stop), ascending")
        end = span[1]
    return Spans(tuple((start, stop) for start, stop in given if stop - start > 1), windows_only)


def chunk_pairs(sizes: Iterable[int]) -> Mask:
    """Return a teacher-forcing mask: clean chunks of these sizes, then noisy ones of the same sizes.

    Raises:
        MaskError: there are no chunks, or an empty chunk.
    """
    given = tuple(map(int, sizes))
    if not given or min(given) < 1:
        raise MaskError(f"chunks of {list(given)} tokens; a mask of pairs has chunks of at least 1 token each")
    return ChunkPairs(given)


def token_types(types: Iterable[int], *, windows_only: bool = False) -> Mask:
    """Return Gemma 3's mask for `token_type_ids`.

    Consecutive tokens of type 1, which form an image, attend to each other bidirectionally; the rest is causal. With
    `windows_only` this holds only in windowed layers.
    """
    is_image = np.fromiter((value == 1 for value in types), dtype=np.int8)
    ends = np.flatnonzero(np.diff(is_image, prepend=0, append=0))
    return segments(ends.reshape(-1, 2).tolist(), windows_only=windows_only)


def mask_of(kind: MaskKind, numbers: Sequence[int]) -> Mask:
    """Return the mask of a kind from its numbers; without numbers it is causal, or `full`.

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
    stops = tokens - np.argmax(seen[:, ::-1], axis=1)  # one past the last key of each query
    if not (seen == (np.arange(tokens) < stops[:, None])).all():
        query = int(np.flatnonzero((seen != (np.arange(tokens) < stops[:, None])).any(axis=1))[0])
        raise MaskError(f"token {query} does not attend to all tokens before the last one that it attends to")
    starts = np.flatnonzero(np.diff(stops, prepend=-1))
    ends = np.append(starts[1:], tokens)
    if not np.array_equal(stops[starts], ends):
        query = int(starts[np.flatnonzero(stops[starts] != ends)[0]])
        raise MaskError(f"token {query} sees up to token {int(stops[query]) - 1}, which does not attend to it")
    return segments(np.stack((starts, ends), axis=1).tolist())


def described(mask: Mask) -> str:
    """Describe a mask for messages."""
    if isinstance(mask, ChunkPairs):
        return f"{counted(len(mask.sizes), 'pair')} of chunks"
    if mask.is_causal:
        return "causal"
    spans = ", ".join(f"{start} to {'the end' if stop == _WHOLE else stop}" for start, stop in mask.spans[:3])
    where = ", only in windowed layers" if mask.windows_only else ""
    return f"spans {spans}{f' and {len(mask.spans) - 3} more' if len(mask.spans) > 3 else ''}{where}"


def _below(bounds: Sequence[int]) -> Iterator[Area]:
    """Yield the areas of later queries and earlier keys between blocks that `bounds` delimit.

    Blocks are halved recursively, and each later half attends to its earlier half: log2(n) rounds, in each of which a
    query or key occurs at most once. Areas are in the order of rounds.
    """
    halves = [(0, len(bounds) - 1)]
    for first, last in halves:  # grows while it is read
        middle = (first + last + 1) // 2
        if last - first > 1:
            yield Area(bounds[middle], bounds[last], bounds[first], bounds[middle])
            halves += [(first, middle), (middle, last)]
