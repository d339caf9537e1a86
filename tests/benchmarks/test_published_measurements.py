"""`python -m benchmarks.published_measurements`: the page quotes what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_measurements import Row, in_order, megatron_rows, prime_rl_rows

PAGE = Path(__file__).parents[2] / "docs" / "research" / "measured-by-others.md"


def test_the_error_is_that_of_the_prediction() -> None:
    row = Row(source="somebody", what="seconds", predicted=1.1, measured=1.0)
    assert row.error == pytest.approx(0.1)
    assert row.line() == "| somebody | seconds | 1.1 | 1 | +10% |"


def test_packs_in_order_are_closed_by_what_does_not_fit_and_split_until_every_group_has_as_many() -> None:
    assert in_order([5, 3, 4, 2, 7], most_tokens=9, groups=1) == [[0, 1], [2, 3], [4]]
    assert in_order([5, 3, 4, 2, 7], most_tokens=9, groups=2) == [[0, 1], [2], [4], [3]]


def test_the_page_has_the_lines_that_are_printed() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    printed = [row.line() for rows in (megatron_rows, prime_rl_rows) for row in rows()]
    assert len(printed) == 17
    assert [line for line in printed if line not in page] == []
