"""Whole jobs killed at any moment, also while a thread writes a checkpoint, go on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fcp_cli.models.cluster import shipped_profile_path
from fcp_cli.runs.checkpoints import checkpoints
from tests.runs.records import read_metrics
from tests.runtime.launch import forked
from tests.training.small_runs import run_fcp, write_manifest, write_small_plan
from tests.training.workers.kill_worker import SETTINGS, STEPS

pytestmark = [pytest.mark.distributed, pytest.mark.hf]


def killed(folder: Path, kills: int) -> Path:
    """A folder with runs that were never killed, killed and resumed on as many ranks, and cut off at the last kill."""
    write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=STEPS)
    forked("tests.training.workers.kill_worker", str(folder), str(kills))
    return folder


def losses_of(run_dir: Path) -> list[tuple[int, float, float]]:
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in read_metrics(run_dir / "metrics.jsonl")
        if line["kind"] == "step"
    ]


def assert_goes_on_as_if_nothing_had_happened(folder: Path, kills: int) -> None:
    straight = losses_of(folder / "whole")
    assert [step for step, _, _ in straight] == list(range(STEPS))
    moments = json.loads((folder / "moments.json").read_text())
    assert len(moments) == kills
    assert moments[0]  # a checkpoint was being written
    assert losses_of(folder / "killed") == straight
    assert not list((folder / "killed" / "checkpoints").glob(".*"))


def resume_on_three_ranks(folder: Path) -> list[tuple[int, float, float]]:
    """As a user does it: with `fcp plan --continue-from`, which reads how the run was launched."""
    run = folder / "cut"
    words = ("launch", *SETTINGS, "--plan", "plan.parquet", "--run-dir", "again", "--dry-run", "--json")
    launch = run_fcp(*words, folder=folder)
    assert launch.returncode == 0, launch.stderr
    (run / "launch.json").write_text(launch.stdout)
    shutil.copyfile(folder / "plan.parquet", run / "plan.parquet")
    profile = shipped_profile_path("qwen3-tiny")
    ways = ("--ranks", "3", "--solver", "fcp-paper", "--profile", str(profile), "-o", "three.parquet")
    planned = run_fcp("plan", "--continue-from", "cut", *ways, folder=folder)
    assert planned.returncode == 0, planned.stderr
    ended = run_fcp("launch", "--run-dir", "cut", "--resume", "--plan", "three.parquet", *SETTINGS[2:4], folder=folder)
    assert ended.returncode == 0, ended.stderr
    return losses_of(run)


@pytest.mark.full
def test_a_job_killed_while_it_saves_and_at_another_moment(tmp_path: Path) -> None:
    assert_goes_on_as_if_nothing_had_happened(killed(tmp_path, 2), 2)


@pytest.mark.full
def test_a_job_killed_at_ten_moments_goes_on_there_and_on_three_ranks(tmp_path: Path) -> None:
    """On the same ranks bit for bit; on fewer, rounded sums in another order of fp64."""
    folder = killed(tmp_path, 10)
    assert_goes_on_as_if_nothing_had_happened(folder, 10)
    assert checkpoints(folder / "cut" / "checkpoints")
    for ours, straight in zip(resume_on_three_ranks(folder), losses_of(folder / "whole"), strict=True):
        assert ours == pytest.approx(straight, rel=1e-12)
