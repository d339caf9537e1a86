"""Lines of a job here about its plan's times: that ranks share cores, and that nobody measured what it predicts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fcp_cli.cli import launch
from fcp_cli.models.cluster import shipped_profile
from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics_reader import RunSummary
from fcp_cli.training.settings import TrainSettings
from tests.launching.jobs import CPU, GPUS, local_job, plan_metadata
from tests.training.small_runs import write_manifest, write_small_plan

ESTIMATED = shipped_profile("qwen3-tiny").text
MEASURED = ESTIMATED.replace("origin: analytic", "origin: measured")


@pytest.mark.parametrize(
    ("slowdown", "profile", "line"),
    [
        (
            12.0,
            ESTIMATED,
            "the plan's times of qwen3-tiny on example-8x8 are estimates, and steps took 12.0 times as long; ",
        ),
        (0.5, ESTIMATED, "the plan's times of qwen3-tiny on example-8x8 are estimates, and steps took 0.5 times"),
        (1.2, ESTIMATED, ""),
        (None, ESTIMATED, ""),
        (12.0, MEASURED, ""),
        (12.0, "", ""),
    ],
)
def test_a_wrong_estimate_is_said_to_be_one(
    slowdown: float | None, profile: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    job = local_job(metadata=plan_metadata(cost_profile=profile), model="my models/tiny")
    found = launch._wrong_estimate(job, slowdown)
    assert found.startswith(line) and bool(found) == bool(line)
    if line:
        assert "measure them with 'fcp profile --model 'my models/tiny''" in found


def test_busy_cores_are_not_blamed_on_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 0.0, 0.0))
    assert launch._wrong_estimate(local_job(metadata=plan_metadata(cost_profile=ESTIMATED)), 12.0) == ""


def test_the_slowdown_leaves_the_warm_up_out() -> None:
    ran = RunSummary()
    assert ran.slowdown is None
    for number, seconds in enumerate((90.0, 3.0, 5.0)):
        step = {"kind": "step", "step": number, "tokens": 1, "seconds": seconds, "predicted_seconds": 2.0}
        ran.feed({**step, "warm_up": number == 0, "loss": None})  # type: ignore[arg-type]
    assert ran.slowdown == 2.0


def test_ranks_that_share_cores_are_said_to() -> None:
    job = local_job(processes_per_node=4)
    assert launch._shared_cores(replace(job, machine=replace(CPU, num_cores=2))) == (
        "4 ranks share 2 CPU cores and take turns: steps take longer than on a core each"
    )
    assert launch._shared_cores(replace(job, machine=replace(CPU, num_cores=4))) == ""
    assert launch._shared_cores(replace(job, machine=replace(GPUS, num_cores=2))) == ""


@pytest.mark.parametrize(("resume", "planned"), [(False, "5 steps"), (True, "3 steps")])
def test_the_time_of_a_resumed_run_is_that_of_the_steps_that_are_left(
    tmp_path: Path, *, resume: bool, planned: str
) -> None:
    plan = write_small_plan(tmp_path / "plan.parquet", write_manifest(tmp_path), steps=6)
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    settings = TrainSettings(plan=plan, model="qwen3-tiny", run_dir=tmp_path, steps=5, resume=resume)
    job = local_job(plan=plan, metadata=PlanReader(plan).metadata, run_dir=tmp_path, settings=settings)
    assert f", {planned} " in (launch._predicted_time(job) or "")
