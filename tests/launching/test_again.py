"""The command that continues a script which was stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fcp_cli.launching.commands import again_command
from fcp_cli.launching.job import Job
from fcp_cli.plan.metadata import OTHER_BATCHES_VARIABLE, PlanningWish
from tests.launching.jobs import local_job


def stopped_job(run_dir: Path, wish: PlanningWish) -> Job:
    return replace(
        local_job(arguments=("train.py",), program=("-m", "fcp_cli.runtime", "--")), run_dir=run_dir, planning=wish
    )


def test_a_job_without_a_plan_continues_with_the_options_that_it_was_planned_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = stopped_job(tmp_path / "run", PlanningWish(model="qwen3-8b", profile="/data/profile.yaml"))

    assert again_command(job) == (
        "fcp launch --ranks 16 --model qwen3-8b --profile /data/profile.yaml --run-dir run -- train.py"
    )


def test_batches_that_were_accepted_stay_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = replace(stopped_job(tmp_path / "run", PlanningWish()), environment={OTHER_BATCHES_VARIABLE: "1"})

    assert again_command(job) == "fcp launch --ranks 16 --accept-other-batches --run-dir run -- train.py"


def test_once_its_plan_is_whole_a_job_continues_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = stopped_job(tmp_path / "run", PlanningWish(model="qwen3-8b"))
    job.paths.plan.parent.mkdir()
    job.paths.plan.touch()

    assert again_command(job) == "fcp launch --plan run/plan.parquet --run-dir run -- train.py"
