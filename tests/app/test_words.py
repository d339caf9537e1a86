from __future__ import annotations

import pytest

from fcp_cli.util.words import counted, duration, first_sentence


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "step", "0 steps"),
        (1, "step", "1 step"),
        (2, "micro-batch", "2 micro-batches"),
        (1200, "rank", "1,200 ranks"),
    ],
)
def test_one_is_singular_and_thousands_are_parted(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00123, "1.23 ms"),
        (0.0456, "45.6 ms"),
        (2.68, "2.68 s"),
        (128.3, "128 s"),
        (1278.0, "21.3 min"),
        (36e3, "10 h"),
    ],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("No footer. Either the file is corrupted or not Parquet."), "No footer"),
        (ValueError("one line\nand more"), "one line"),
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory"),
        (KeyError(), "KeyError"),
    ],
)
def test_of_an_error_only_its_first_sentence_is_kept(error: Exception, text: str) -> None:
    assert first_sentence(error) == text
