"""What a mask counts, and the areas that make it up, are those of its definition, pair by pair."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given

from fcp_cli.errors import MaskError
from fcp_cli.util.masks import CAUSAL, Area, Mask, chunk_pairs, full, prefix, segments
from tests.masks import Masked, all_masked, seen

BoolArray = npt.NDArray[np.bool_]


@given(masked=all_masked())
def test_areas_cover_what_the_mask_lets_through_and_nothing_twice(masked: Masked) -> None:
    for cuts in (None, (0, masked.length)):
        found = np.zeros((masked.length, masked.length), dtype=np.int64)
        for area in masked.mask.areas(masked.length, cuts):
            found[area.q_start : area.q_stop, area.k_start : area.k_stop] += _let_through(area)
        assert np.array_equal(found, seen(masked))


def _let_through(area: Area) -> BoolArray:
    queries = np.arange(area.q_start, area.q_stop)[:, None]
    keys = np.arange(area.k_start, area.k_stop)[None, :]
    if area.shape == "full":
        whole: BoolArray = np.ones((len(queries), keys.shape[1]), dtype=np.bool_)
        return whole
    assert (area.q_start, area.q_stop) == (area.k_start, area.k_stop), "triangles lie on the diagonal"
    triangle: BoolArray = keys <= queries if area.shape == "causal" else keys > queries
    return triangle


@given(masked=all_masked())
def test_pairs_are_counted_exactly_and_eta_runs_from_causal_to_full(masked: Masked) -> None:
    mask, length = masked.mask, masked.length
    assert mask.pairs(length) == sum(area.pairs for area in mask.areas(length)) == int(seen(masked).sum())
    causal, whole = length * (length + 1) / 2, length * length
    assert mask.eta(length) * (whole - causal) == pytest.approx(mask.pairs(length) - causal if length > 1 else 0)


@given(masked=all_masked())
def test_triangles_lie_within_one_stretch_and_spans_beyond_a_sixteenth_are_stretches(masked: Masked) -> None:
    mask, length = masked.mask, masked.length
    cuts = mask.cuts(length)
    assert cuts[0] == 0
    assert cuts[-1] == length
    for area in mask.areas(length):
        inside = [start <= area.q_start and area.q_stop <= stop for start, stop in pairwise(cuts)]
        assert area.shape == "full" or any(inside)
        assert area.shape != "later" or 16 * (area.q_stop - area.q_start) < length


@pytest.mark.parametrize(
    ("mask", "length", "eta"),
    [
        (CAUSAL, 1000, 0.0),
        (full(), 1000, 1.0),
        (full(), 1, 0.0),
        (prefix(0), 1000, 0.0),
        (prefix(5000), 1000, 1.0),
        (prefix(500), 1000, 500 * 499 / (1000 * 999)),
        (segments([(10, 11), (20, 24)]), 100, 6 / (50 * 99)),
        (chunk_pairs([100] * 5), 1000, (300_000 - 500_500) / 499_500),
    ],
)
def test_eta_is_0_for_causal_1_for_full_and_below_0_for_less_than_causal(mask: Mask, length: int, eta: float) -> None:
    assert mask.eta(length) == pytest.approx(eta, abs=1e-12)


def test_a_sequence_of_many_chunks_needs_few_rounds_of_areas() -> None:
    """In a round no query and no key takes part twice, so that it can be one call of a kernel."""
    sizes = [3] * 100
    clean = [area for area in chunk_pairs(sizes).areas(600) if area.q_stop <= 300]
    rounds: list[BoolArray] = []
    for area in clean:
        for busy in rounds:
            if not busy[0, area.q_start : area.q_stop].any() and not busy[1, area.k_start : area.k_stop].any():
                break
        else:
            busy = np.zeros((2, 600), dtype=np.bool_)
            rounds.append(busy)
        busy[0, area.q_start : area.q_stop] = busy[1, area.k_start : area.k_stop] = True
    assert len(rounds) == 8, "log2(100), rounded up, and the chunks themselves"


def test_noisy_tokens_have_the_positions_of_their_clean_ones() -> None:
    assert chunk_pairs([1, 2]).position_ids(6).tolist() == [0, 1, 2, 0, 1, 2]
    assert prefix(2).position_ids(4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mask", "length", "reason"),
    [
        (segments([(0, 4), (6, 12)]), 10, "its mask has a span up to token 12"),
        (chunk_pairs([3, 4]), 13, "its mask has chunk pairs of 14 tokens, which cannot be truncated"),
        (chunk_pairs([3, 4]), 14, ""),
        (full(), 10, ""),
        (CAUSAL, 10, ""),
    ],
)
def test_a_mask_says_which_sequence_it_does_not_fit(mask: Mask, length: int, reason: str) -> None:
    assert mask.misfit(length) == reason


@pytest.mark.parametrize("spans", [[(4, 2)], [(0, 5), (4, 8)], [(-1, 3)], [(1, 2, 3)]])
def test_spans_that_overlap_or_run_backwards_are_refused(spans: list[tuple[int, ...]]) -> None:
    with pytest.raises(MaskError, match=r"span \(.*\) of a mask does not follow token \d"):
        segments(spans)


def test_what_is_no_mask_is_refused() -> None:
    with pytest.raises(MaskError, match="a prefix has -1 tokens; it has 0 or more"):
        prefix(-1)
    with pytest.raises(MaskError, match=r"chunks of \[3, 0\] tokens; a mask of pairs has chunks of at least 1 token"):
        chunk_pairs([3, 0])
    with pytest.raises(MaskError, match=r"chunks of \[\] tokens"):
        chunk_pairs([])


def test_equal_masks_are_equal_values() -> None:
    assert hash(prefix(3)) == hash(segments([(0, 3), (7, 8)]))
    assert prefix(1) == CAUSAL
    assert CAUSAL.is_causal
    assert not full().is_causal
