from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.manifest.read import PERCENTILES, count_pictures, summarize
from fcp_cli.manifest.table import LengthTable
from tests.manifest.datasets import write_parquet


def table_of(lengths: list[int]) -> LengthTable:
    return LengthTable(name="m", length_tokens=np.array(lengths, np.int64))


@settings(max_examples=50)
@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=300))
def test_the_histogram_holds_every_sequence_and_token_once(lengths: list[int]) -> None:
    summary = summarize(table_of(lengths))
    assert sum(span.sequences for span in summary.bins) == len(lengths) == summary.rows
    assert sum(span.tokens for span in summary.bins) == sum(lengths) == summary.tokens
    for span in summary.bins:
        assert span.sequences == sum(span.from_tokens <= length < span.to_tokens for length in lengths)
    assert [span.to_tokens for span in summary.bins[:-1]] == [span.from_tokens for span in summary.bins[1:]]
    assert summary.bins[0].sequences > 0
    assert summary.bins[-1].sequences > 0


@settings(max_examples=50)
@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=300))
def test_a_percentile_is_the_smallest_length_that_so_many_do_not_exceed(lengths: list[int]) -> None:
    summary = summarize(table_of(lengths))
    for percentile in PERCENTILES:
        found = summary.percentiles[percentile]
        assert sum(length <= found for length in lengths) >= percentile / 100 * len(lengths) - 1e-9
        assert sum(length < found for length in lengths) < percentile / 100 * len(lengths)


def test_the_figures_of_a_known_manifest() -> None:
    summary = summarize(table_of([1] * 198 + [100, 700]))
    assert (summary.min_tokens, summary.max_tokens, summary.tokens) == (1, 700, 998)
    assert summary.mean_tokens == pytest.approx(4.99)
    assert summary.percentiles == {50.0: 1, 90.0: 1, 99.0: 1, 99.9: 700}
    assert summary.longest_percent_token_share == pytest.approx(800 / 998)


def test_the_document_is_valid_json() -> None:
    document = json.loads(json.dumps(summarize(table_of([3, 5])).as_json(), allow_nan=False))
    assert document["length_tokens"] == {"min": 3, "mean": 4.0, "max": 5, "p50": 3, "p90": 5, "p99": 5, "p99.9": 5}
    assert document["histogram"] == [
        {"from_tokens": 2, "to_tokens": 4, "sequences": 1, "tokens": 3},
        {"from_tokens": 4, "to_tokens": 8, "sequences": 1, "tokens": 5},
    ]


def test_pictures_are_counted_over_all_the_batches_that_a_manifest_is_read_in(tmp_path: Path) -> None:
    rows = 100_000  # Arrow reads 65,536 at a time
    columns = {"length": np.full(rows, 9), "num_images": np.full(rows, 2), "vision_patches": np.arange(rows)}
    assert count_pictures(write_parquet(tmp_path / "m.parquet", columns)) == {
        "num_images": 2 * rows,
        "vision_patches": sum(range(rows)),
    }
