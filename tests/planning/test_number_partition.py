from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.planning.drafts import partition

weights = st.lists(st.integers(0, 100).map(float), max_size=30)


@given(weights, st.integers(1, 6), st.booleans())
def test_every_item_lies_in_one_part(items: list[float], parts: int, equal_counts: bool) -> None:
    found = partition(items, parts, equal_counts=equal_counts)
    assert len(found) == parts
    assert sorted(item for part in found for item in part) == list(range(len(items)))


@given(weights, st.integers(1, 6))
def test_equal_counts_differ_by_one_at_most(items: list[float], parts: int) -> None:
    counts = [len(part) for part in partition(items, parts, equal_counts=True)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.integers(1, 30).map(float), min_size=1, max_size=7), st.integers(2, 3))
def test_the_heaviest_part_is_within_the_known_ratio_of_the_best(items: list[float], parts: int) -> None:
    heaviest = max(sum(items[i] for i in part) for part in partition(items, parts))
    best = min(
        max(sum(w for w, p in zip(items, choice, strict=True) if p == part) for part in range(parts))
        for choice in product(range(parts), repeat=len(items))
    )
    assert heaviest <= (4 / 3) * best  # Fischetti and Martello 1987 for two parts; Michiels et al. 2007 for more


def test_differencing_finds_what_longest_first_misses() -> None:
    items = [8.0, 7.0, 6.0, 5.0, 4.0]  # longest first: 8 + 5 + 4 against 7 + 6
    sums = [sum(items[i] for i in part) for part in partition(items, 2)]
    assert sums == pytest.approx([16.0, 14.0])
