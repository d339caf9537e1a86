"""`python -m benchmarks.published_measurements`: the page quotes what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_measurements import (
    Row,
    in_order,
    kernel_rows,
    long_rows,
    megatron_rows,
    prime_rl_rows,
    ring_rows,
    simumax_rows,
    torchtitan_rows,
)

PAGE = Path(__file__).parents[2] / "docs" / "research" / "measured-by-others.md"


_QUICK = (long_rows, kernel_rows, ring_rows, simumax_rows, torchtitan_rows, megatron_rows, prime_rl_rows)


def test_whole_steps_and_rings_that_chose_no_coefficient_are_predicted_within_a_tenth() -> None:
    rows = [row for part in (long_rows, ring_rows) for row in part() if row.role == "tests"]
    assert len(rows) == 10
    assert [row.line() for row in rows if abs(row.error) > 0.1] == []


def test_the_error_is_that_of_the_prediction() -> None:
    row = Row(source="somebody", what="seconds", predicted=1.1, measured=1.0)
    assert row.error == pytest.approx(0.1)
    assert row.line() == "| somebody | seconds | 1.1 | 1 | +10% | tests |"


def test_packs_in_order_are_closed_by_what_does_not_fit_and_split_until_every_group_has_as_many() -> None:
    assert in_order([5, 3, 4, 2, 7], most_tokens=9, groups=1) == [[0, 1], [2, 3], [4]]
    assert in_order([5, 3, 4, 2, 7], most_tokens=9, groups=2) == [[0, 1], [2], [4], [3]]


@pytest.mark.lengthy
def test_the_page_has_the_lines_that_are_printed() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    printed = [row.line() for rows in _QUICK for row in rows()]
    assert len(printed) == 89
    assert [line for line in printed if line not in page] == []
