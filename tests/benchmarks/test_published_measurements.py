"""`python -m benchmarks.published_measurements`: the page quotes what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_measurements import Row, megatron_rows, prime_rl_rows

PAGE = Path(__file__).parents[2] / "docs" / "research" / "measured-by-others.md"


def test_the_error_is_that_of_the_prediction() -> None:
    row = Row(source="somebody", what="seconds", predicted=1.1, measured=1.0)
    assert row.error == pytest.approx(0.1)
    assert row.line() == "| somebody | seconds | 1.1 | 1 | +10% |"


def test_the_page_has_the_lines_that_are_printed() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    printed = [row.line() for rows in (megatron_rows, prime_rl_rows) for row in rows()]
    assert len(printed) == 14
    assert [line for line in printed if line not in page] == []
