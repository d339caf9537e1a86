from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.planning.drafts import (
    best_fit_decreasing,
    first_fit_decreasing,
    members_by_pack,
    min_degrees,
    spread_evenly,
)

token_lists = st.lists(st.integers(1, 5000), min_size=1, max_size=60).map(
    lambda tokens: np.array(tokens, dtype=np.int64)
)


def test_a_sequence_that_fills_its_ranks_exactly_needs_no_more() -> None:
    assert min_degrees(np.array([1, 1000, 1001, 2000]), 1000).tolist() == [1, 1, 2, 2]


def test_first_fit_takes_the_first_pack_with_room() -> None:
    assert first_fit_decreasing(np.array([3, 7, 6, 4]), 10).tolist() == [0, 0, 1, 1]


def test_best_fit_takes_the_fullest_pack_with_room() -> None:
    # 6 leaves 4, 7 leaves 3: the 3 goes to the 7, though the room beside the 6 would do.
    pack_of, degrees = best_fit_decreasing(np.array([6, 7, 3]), 10)
    assert pack_of[2] == pack_of[1] != pack_of[0]
    assert degrees.tolist() == [1, 1]


def test_best_fit_fills_the_room_that_a_long_sequence_leaves_on_its_ranks() -> None:
    pack_of, degrees = best_fit_decreasing(np.array([25, 5]), 10)
    assert pack_of.tolist() == [0, 0]
    assert degrees.tolist() == [3]


@given(token_lists, st.integers(1, 2000))
def test_best_fit_keeps_every_pack_within_its_ranks(
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]], budget: int
) -> None:
    pack_of, degrees = best_fit_decreasing(tokens, budget)
    held = np.bincount(pack_of, weights=tokens, minlength=len(degrees))
    assert len(held) == len(degrees)
    assert (held > 0).all()
    assert (held <= degrees * budget).all()


@given(token_lists)
def test_first_fit_leaves_no_two_packs_that_would_fit_in_one(
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    held = np.sort(np.bincount(first_fit_decreasing(tokens, 5000), weights=tokens))
    assert held.max() <= 5000
    assert len(held) == 1 or held[0] + held[1] > 5000


@given(token_lists, st.integers(1, 8))
def test_members_come_back_by_pack(tokens: np.ndarray[tuple[int], np.dtype[np.int64]], packs: int) -> None:
    pack_of = spread_evenly(tokens, packs)
    offsets, members = members_by_pack(pack_of, packs)
    assert sorted(members.tolist()) == list(range(len(tokens)))
    for pack in range(packs):
        inside = members[offsets[pack] : offsets[pack + 1]]
        assert (pack_of[inside] == pack).all()
        assert (np.diff(inside) > 0).all()
