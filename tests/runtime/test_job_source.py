"""A job without a plan has its times fitted to its first minute, once; one rank, planning in process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader, table_of
from fcp_cli.plan.metadata import PlanningWish, settings_of_json
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.job_plan import JobPlanner
from fcp_cli.runtime import online_job
from fcp_cli.runtime.online import Measured
from fcp_cli.runtime.online_job import JobSource
from fcp_cli.runtime.planner_process import JobProcess
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import decode_json
from tests.planning.test_job_plan import JOB, LENGTHS

pytestmark = pytest.mark.torch


class OneRank:
    """A `Control` of a job of one rank."""

    rank, size = 0, 1

    def from_rank(self, rank: int, message: bytes) -> bytes:
        return message

    def table(self, words: list[int]) -> IntArray:
        return np.array([words], dtype=np.int64)


class PlanningHere:
    """The planner process, in this one."""

    def __init__(self, planner: JobPlanner) -> None:
        self.planner, self.opened = planner, planner.opened()

    def plan(self, first_step: int, steps: int) -> list[StepPlan]:
        return self.planner.plan(first_step, steps)

    def refit(self, first_step: int, measured: bytes) -> Mapping[str, Any]:
        return {"line": self.planner.refit(table_of(measured))}

    def close(self, end_step: int, *, is_stopped: bool) -> str | None:
        return self.planner.close(end_step, is_stopped=is_stopped)


def record(step: StepPlan, factor: float, *, warm_up: bool = False) -> dict[str, Any]:
    """The metrics of a step that took `factor` times as long as predicted."""
    timed = [{"order": one.order, "seconds": one.seconds * factor} for one in step.microbatches()]
    ranks = [{"rank": 0, "micro_batches": timed}]
    return {
        "kind": "step",
        "step": step.step,
        "seconds": step.makespan_seconds * factor,
        "warm_up": warm_up,
        "ranks": ranks,
    }


def test_enough_is_measured_after_so_many_seconds_or_steps_of_enough_micro_batches() -> None:
    measured, ranks = Measured(), [{"rank": 0, "micro_batches": [{"order": 0, "seconds": 1.0}]}]
    for step in range(4):
        measured.note({"kind": "step", "step": step, "seconds": 2.0, "warm_up": step == 0, "ranks": ranks})

    assert measured.has(seconds=6.0, steps=9, micro_batches=3)
    assert measured.has(seconds=9.0, steps=3, micro_batches=3)
    assert not measured.has(seconds=7.0, steps=4, micro_batches=3)
    assert not measured.has(seconds=6.0, steps=3, micro_batches=4)
    measured.take()
    assert not measured.has(seconds=1.0, steps=1, micro_batches=1)


def test_a_job_is_planned_by_the_times_of_its_first_steps_once_enough_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(online_job, "_MEASURED_STEPS", 8)
    plan = tmp_path / "plan.parquet"
    planner = JobPlanner(plan, replace(JOB, ranks=1, ranks_per_node=1, epochs=20), PlanningWish(), LENGTHS)
    process = PlanningHere(planner)
    settings = settings_of_json(decode_json(process.opened["settings"]), name="the settings")
    source = JobSource(settings, plan, OneRank(), LENGTHS, cast(JobProcess, process))

    source.open(0)
    for step in source.steps():
        source.want(step.step)
        source.measured.note(record(step, 3.0, warm_up=step.step == 0))
    source.close(settings.metadata.end_step)

    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fcp: step ")]
    assert len(said) == 1
    assert (refits := PlanReader(plan).metadata.refits) is not None
    assert said[0].startswith(f"fcp: step {refits[0].first_step}: ")
    assert 8 < refits[0].first_step < settings.metadata.end_step


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # nobody waits for its end
def test_a_planner_that_is_killed_ends_the_job_by_name_and_another_completes_the_plan_of_one_that_has_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.parquet"
    planner = JobProcess(plan, JOB, PlanningWish(), LENGTHS)
    steps = planner.plan(0, 2)
    planner._process.kill()

    with pytest.raises(RunError, match="planning process was ended by signal 9"):
        planner.plan(2, 1)
    assert planner.close(5) == PlanReader(plan).metadata.plan_hash
    assert [step.to_dict() for step in PlanReader(plan).steps()][:2] == [step.to_dict() for step in steps]
    assert "another one completes the plan" in capsys.readouterr().err
