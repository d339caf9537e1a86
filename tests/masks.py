"""Masks that are hard to cut, and what each lets through by its definition alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from fcp_cli.util.masks import CAUSAL, ChunkPairs, Mask, Spans, chunk_pairs, full, prefix, segments


@dataclass(frozen=True, slots=True)
class Masked:
    """The mask of a sequence of so many tokens."""

    mask: Mask
    length: int


def seen(masked: Masked, *, in_windows: bool = False) -> npt.NDArray[np.bool_]:
    """[queries, keys]: whether the query sees the key, of a layer with windows or one without; windows limit it."""
    mask, length = masked.mask, masked.length
    queries, keys = np.arange(length)[:, None], np.arange(length)[None, :]
    if isinstance(mask, ChunkPairs):
        half = length // 2
        chunk = np.tile(np.repeat(np.arange(len(mask.sizes)), mask.sizes), 2)
        is_noisy = np.arange(length) >= half
        q_chunk, k_chunk, q_noisy, k_noisy = chunk[:, None], chunk[None, :], is_noisy[:, None], is_noisy[None, :]
        clean = ~q_noisy & ~k_noisy & (k_chunk <= q_chunk)
        noisy: npt.NDArray[np.bool_] = q_noisy & np.where(k_noisy, k_chunk == q_chunk, k_chunk < q_chunk)
        return clean | noisy
    assert isinstance(mask, Spans)
    allowed: npt.NDArray[np.bool_] = keys <= queries
    for start, stop in () if mask.windows_only and not in_windows else mask.spans:
        allowed = allowed | ((start <= queries) & (queries < stop) & (start <= keys) & (keys < stop))
    return allowed


def spans_within(length: int) -> st.SearchStrategy[Mask]:
    """Segments that may end anywhere in a sequence."""
    ends = st.lists(st.integers(0, length), max_size=8).map(sorted)
    return ends.map(lambda found: segments(zip(found[::2], found[1::2], strict=False)))


@st.composite
def all_masked(draw: st.DrawFn, longest: int = 60) -> Masked:
    """Any mask of a sequence of up to `longest` tokens."""
    kind = draw(st.sampled_from(["causal", "full", "prefix", "segments", "pairs"]))
    if kind == "pairs":
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=max(1, longest // 10)))
        return Masked(chunk_pairs(sizes), 2 * sum(sizes))
    length = draw(st.integers(1, longest))
    if kind == "segments":
        mask = draw(spans_within(length))
        assert isinstance(mask, Spans)
        return Masked(replace(mask, windows_only=draw(st.booleans())), length)
    return Masked({"causal": CAUSAL, "full": full(), "prefix": prefix(draw(st.integers(0, length)))}[kind], length)


def random_mask(generator: random.Random, length: int) -> Mask:
    """Any mask that a sequence of so many tokens can have."""
    kinds: list[Mask] = [CAUSAL, full(), prefix(generator.randint(0, length))]
    ends = sorted(generator.sample(range(length + 1), min(length + 1, 2 * generator.randint(0, 3)) // 2 * 2))
    kinds.append(segments(zip(ends[::2], ends[1::2], strict=True)))
    if length % 2 == 0:
        cuts = sorted({0, length // 2, *(generator.randint(0, length // 2) for _ in range(3))})
        kinds.append(chunk_pairs(stop - start for start, stop in pairwise(cuts)))
    return generator.choice(kinds)
