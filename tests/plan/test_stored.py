"""The border of a plan: whoever reads steps gets none with a value that no plan can have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.errors import PlanError
from fcp_cli.plan.file import PlanReader, broken_values, plan_writer, steps_to_arrow, stored_steps
from fcp_cli.plan.step import StepPlan
from tests.cli.planning_folder import fcp
from tests.plan.plans import Columns, rewritten, small_plan

HUGE = 1e300


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_plan(tmp_path_factory.mktemp("plan") / "plan.parquet")


def everywhere(column: str, value: Any) -> Callable[[Columns], None]:
    def edit(columns: Columns) -> None:
        before = columns.get(column, columns["step"])
        columns[column] = [value(old) if callable(value) else value for old in before]

    return edit


HOSTILE = [
    ("ranks", lambda _: [], "no ranks"),
    ("ranks", lambda ranks: [rank + 16 for rank in ranks], r"rank \d+ of a job of 16"),
    ("ranks", lambda ranks: [-1, *ranks], "rank -1 of a job of 16"),
    ("ranks", lambda ranks: [ranks[-1], *ranks], r"its ranks do not ascend: \d+ follows \d+"),
    ("sequences", lambda rows: [row + 2**40 for row in rows], r"sequence \d+ of a manifest of 63 rows"),
    ("sequences", lambda rows: [-row - 1 for row in rows], r"sequence -\d+ of a manifest of 63 rows"),
    ("sequences", lambda rows: rows[1:], "as many sequences as lengths are needed"),
    ("lengths", lambda lengths: [0] * len(lengths), r"sequence \d+ has 0 tokens"),
    ("lengths", lambda lengths: [-length for length in lengths], r"sequence \d+ has -\d+ tokens"),
    ("lengths", lambda lengths: [*lengths, 7], "as many sequences as lengths are needed"),
    ("wave", 2**31 - 1, r"wave 2147483647 of \d+ rows"),
    ("wave", -2, r"wave -2 of \d+ rows"),
    ("order", 0, "rows out of order: order 0 in place 1"),
    *(
        (column, value, f"{column} is {value}".replace("+", r"\+"))
        for column in ("seconds", "start_seconds", "step_seconds", "step_bound_seconds")
        for value in (float("nan"), float("inf"), -1.0, HUGE)
    ),
]


@pytest.mark.parametrize(("column", "value", "message"), HOSTILE)
def test_no_reader_gets_a_step_with_an_impossible_value(sound: Path, column: str, value: Any, message: str) -> None:
    path = rewritten(sound, edit=everywhere(column, value))
    with pytest.raises(PlanError, match=rf"^{path}: step 0: (order \d+: )?{message}; see 'fcp check {path}'$"):
        list(PlanReader(path).steps())


@pytest.mark.lengthy
@pytest.mark.parametrize("value", [0, -1, 7, 2**31 - 1])
def test_a_heads_degree_that_divides_no_degree_is_refused_by_every_command(sound: Path, value: int) -> None:
    path = rewritten(sound, edit=everywhere("heads_degree", value), attention="2d")
    with pytest.raises(PlanError, match=f"a heads degree of {value} does not divide the degree"):
        list(PlanReader(path).steps())
    for command in ("report FILE -o out.html", "inspect FILE", "check FILE"):
        result = fcp(*command.replace("FILE", path.name).split(), cwd=path.parent)
        assert result.returncode == 1, command
        assert f"a heads degree of {value} does not divide the degree" in result.stderr + result.stdout


def test_a_step_that_is_missing_is_refused(sound: Path) -> None:
    path = rewritten(sound, edit=everywhere("step", lambda step: step + (step > 0)))
    with pytest.raises(PlanError, match="step 1: it is missing: step 2 stands in its place; see 'fcp check"):
        list(PlanReader(path).steps())


def test_predicted_seconds_are_checked_without_the_other_columns(sound: Path) -> None:
    path = rewritten(sound, edit=everywhere("step_seconds", float("inf")))
    with pytest.raises(PlanError, match=r"step 0: step_seconds is inf; see 'fcp check"):
        PlanReader(path).predicted_seconds()


def test_a_plan_that_no_reader_would_take_is_not_written(sound: Path, tmp_path: Path) -> None:
    reader = PlanReader(sound)
    step = next(reader.steps())
    slow = replace(step, makespan_seconds=1e20)
    with (
        pytest.raises(
            PlanError, match=r"^step 0 takes 1e\+20 s by its cost profile; a plan holds times of at most 1e\+15 s"
        ),
        plan_writer(tmp_path / "plan.parquet", reader.metadata) as writer,
    ):
        writer.append(slow)
    assert list(tmp_path.iterdir()) == []


def large_step(num_ranks: int, sequences: int) -> StepPlan:
    """Every rank a group, with as many sequences each."""
    each = sequences // num_ranks
    return StepPlan(
        step=0,
        wave=np.full(num_ranks, -1, np.int32),
        rank_offsets=np.arange(num_ranks + 1),
        ranks=np.arange(num_ranks, dtype=np.int32),
        sequence_offsets=np.arange(num_ranks + 1) * each,
        sequences=np.arange(sequences),
        lengths=np.full(sequences, 1000, np.int32),
        start_seconds=np.zeros(num_ranks),
        seconds=np.ones(num_ranks),
        makespan_seconds=1.0,
        bound_seconds=1.0,
    )


def test_a_step_of_16384_ranks_and_65536_sequences_is_checked_in_milliseconds() -> None:
    step, limits = large_step(16_384, 65_536), (16_384, 65_536)
    began = time.perf_counter()
    for _ in range(10):
        assert broken_values(step, *limits) is None
    seconds = (time.perf_counter() - began) / 10
    assert seconds < 0.1  # some 1 ms on an idle core
    assert [fault for _, fault in stored_steps(steps_to_arrow([step]), *limits)] == [None]
