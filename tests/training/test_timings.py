from __future__ import annotations

from pathlib import Path

import pytest

from fcp_cli.plan.reader import PlanReader
from fcp_cli.training.timings import decode, encode, most_microbatches
from tests.training.small_runs import write_manifest, write_small_plan

pytestmark = pytest.mark.torch


def test_timings_of_all_ranks_survive_the_gathering(tmp_path: Path) -> None:
    plan_path = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1)
    plan = next(PlanReader(plan_path).steps())
    most = most_microbatches(plan)
    assert most == 2
    sent = [[(0, 0.0, 0.5), (2, 0.5, 0.25)], [(0, 0.1, 0.4)], [], [(1, 0.0, 0.125)]]
    found = decode([encode(timings, most=most) for timings in sent], plan)
    assert not found.stop
    assert not found.writing
    ranks = found.ranks
    assert [[(t.order, t.start_seconds, t.seconds) for t in timings] for timings in ranks] == sent
    first = ranks[0][1]
    assert (first.degree, first.tokens) == (2, int(plan.tokens[2]))
    assert first.predicted_seconds == plan.seconds[2]


def test_one_rank_that_was_asked_to_stop_stops_all(tmp_path: Path) -> None:
    plan_path = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1)
    plan = next(PlanReader(plan_path).steps())
    vectors = [encode([], stop=rank == 2, most=2) for rank in range(4)]
    assert decode(vectors, plan).stop
    assert not decode(vectors, plan).writing


def test_a_checkpoint_is_being_written_as_long_as_one_rank_writes(tmp_path: Path) -> None:
    plan_path = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1)
    plan = next(PlanReader(plan_path).steps())
    assert decode([encode([], writing=rank == 3, most=2) for rank in range(4)], plan).writing


def test_the_peak_of_memory_is_that_of_the_rank_with_most(tmp_path: Path) -> None:
    plan_path = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=1)
    plan = next(PlanReader(plan_path).steps())
    bytes_of = [1 << 36, (1 << 36) + 1, 7, 0]  # more than a float32 holds
    assert decode([encode([], peak_bytes=most, most=2) for most in bytes_of], plan).peak_bytes == (1 << 36) + 1
