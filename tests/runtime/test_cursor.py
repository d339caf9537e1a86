from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.errors import PlanError, RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.rings import ring_order
from fcp_cli.runtime.cursor import PlanCursor, Prefetched
from tests.patience import PATIENCE_SECONDS
from tests.runtime.plans import Row, random_steps, write_plan

STEPS = [
    [Row([0, 2], [7, 3]), Row([1], [5]), Row([0], [2])],
    [Row([1, 2], [9]), Row([0])],
    [Row([0, 1, 2], [4, 4])],
]


@settings(max_examples=20)
@given(st.integers(1, 12), st.sampled_from([0, 3]), st.integers(0, 10**6))
def test_each_rank_gets_its_rows_in_the_steps_order(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int, ahead: int, seed: int
) -> None:
    plan = tmp_path_factory.mktemp("plan") / "plan.parquet"
    write_plan(plan, random_steps(num_ranks, 5, sync="iteration", seed=seed), num_ranks=num_ranks)
    for rank in range(num_ranks):
        wanted = [tuple(row for row in step.microbatches() if rank in row.ranks) for step in PlanReader(plan).steps()]
        assert [step.rows for step in PlanCursor(plan, rank, ahead=ahead, ascending=True)] == wanted
        per_node = PlanReader(plan).metadata.ranks_per_node
        rings = [tuple(replace(row, ranks=ring_order(row.ranks, per_node)) for row in rows) for rows in wanted]
        assert [step.rows for step in PlanCursor(plan, rank, ahead=ahead)] == rings


def test_a_step_carries_its_totals(tmp_path: Path) -> None:
    step = next(iter(PlanCursor(write_plan(tmp_path / "p", STEPS, num_ranks=3), rank=1)))
    assert (step.step, step.loss_tokens, step.sequences) == (0, 13, 4)
    assert (step.makespan_seconds, step.bound_seconds) == (12.0, 5.0)


def test_reading_begins_at_the_first_step_asked_for(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", STEPS, num_ranks=3)
    assert [step.step for step in PlanCursor(plan, 0, first_step=2)] == [2]
    assert [step.step for step in PlanCursor(plan, 0, first_step=3)] == []


def test_a_first_step_beyond_the_plan_is_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", STEPS, num_ranks=3)
    with pytest.raises(RunError, match=r"step 4 is not in .* which ends after 3 steps; plan more with --epochs"):
        PlanCursor(plan, 0, first_step=4)


def test_a_step_without_a_row_for_the_rank_is_named(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", [STEPS[0], [Row([0, 1], [3])]], num_ranks=3)
    with pytest.raises(RunError, match="step 1 has no micro-batch for rank 2; see 'fcp check"):
        list(PlanCursor(plan, 2))


def test_a_damaged_plan_fails_where_it_is_opened(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p", STEPS, num_ranks=3)
    plan.write_bytes(plan.read_bytes()[:-20])
    with pytest.raises(PlanError, match="cannot be read as Parquet"):
        PlanCursor(plan, 0)


def test_a_closed_cursor_ends_its_thread(tmp_path: Path) -> None:
    cursor = PlanCursor(write_plan(tmp_path / "p", STEPS * 50, num_ranks=3), 0, ahead=2)
    next(iter(cursor))
    cursor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "fcp-plan-cursor"]
    assert list(cursor) == []


def test_no_more_than_depth_items_are_made_ahead() -> None:
    made: list[int] = []
    reached = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            reached.release()
            yield i

    prefetched = Prefetched(items(), depth=3, name="test")
    assert next(prefetched) == 0
    for _ in range(5):  # the one taken, three waiting, and the one in the thread's hands
        assert reached.acquire(timeout=PATIENCE_SECONDS)
    assert not reached.acquire(timeout=0.05)
    prefetched.close()
    assert made == [0, 1, 2, 3, 4]


def test_an_error_in_the_thread_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise RunError("row 7 cannot be read")

    prefetched = Prefetched(items(), depth=4, name="test")
    assert next(prefetched) == 1
    with pytest.raises(RunError, match="row 7 cannot be read"):
        next(prefetched)
