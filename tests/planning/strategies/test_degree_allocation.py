from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.planning.strategies.fcp_paper import allocate_by_threshold, at_most_table, degrees_used
from fcp_cli.util.arrays import FloatArray, IntArray
from tests.planning.strategies.printed_allocations import allocate_as_printed, allocate_by_dynamic_programme


@st.composite
def exact_tables(draw: st.DrawFn, most_packs: int = 4, most_ranks: int = 7) -> FloatArray:
    """Seconds of packs on exactly d ranks: any values, equal ones and ones that rise with the degree among them."""
    packs = draw(st.integers(1, most_packs))
    ranks = draw(st.integers(packs, most_ranks))
    seconds = st.one_of(st.integers(1, 5).map(float), st.floats(0.01, 100.0))
    table = np.array([[draw(seconds) for _ in range(ranks)] for _ in range(packs)])
    spare = ranks - packs
    for row in table:
        least = draw(st.integers(0, spare))
        spare -= least
        row[:least] = np.inf
    return table


def makespan(table: FloatArray, degrees: IntArray) -> float:
    return float(table[np.arange(len(table)), degrees - 1].max())


def best_by_trying_all(table: FloatArray) -> float:
    packs, ranks = table.shape
    return min(
        makespan(table, np.array(degrees))
        for degrees in product(range(1, ranks + 1), repeat=packs)
        if sum(degrees) <= ranks
    )


@settings(max_examples=150)
@given(exact_tables())
def test_threshold_dynamic_programme_and_printed_algorithm_equal_exhaustive_search(exact: FloatArray) -> None:
    num_ranks = exact.shape[1]
    best = best_by_trying_all(exact)
    for allocate in (allocate_by_threshold, allocate_by_dynamic_programme, allocate_as_printed):
        allocated = allocate(at_most_table(exact), num_ranks)
        degrees = degrees_used(exact, allocated)
        assert allocated.sum() <= num_ranks
        assert (degrees <= allocated).all()
        assert makespan(exact, degrees) == best


@settings(max_examples=40)
@given(exact_tables(most_packs=20, most_ranks=40))
def test_threshold_and_dynamic_programme_agree_on_larger_tables(exact: FloatArray) -> None:
    table, num_ranks = at_most_table(exact), exact.shape[1]
    by_threshold = makespan(table, allocate_by_threshold(table, num_ranks))
    assert by_threshold == makespan(table, allocate_by_dynamic_programme(table, num_ranks))


def test_times_that_differ_in_the_last_bit_end_the_bisection() -> None:
    table = np.array([[1.0, 0.5], [np.nextafter(1.0, 2.0), 0.5]])
    assert allocate_by_threshold(table, 2).tolist() == [1, 1]
    assert allocate_by_threshold(table, 3).tolist() == [1, 2]


def test_packs_that_need_more_ranks_than_there_are_are_refused() -> None:
    table = np.array([[np.inf, 2.0], [1.0, 1.0]])
    with pytest.raises(AssertionError, match="more ranks than there are"):
        allocate_by_threshold(table, 2)
