"""Rank 0 of a job without a plan starts its planner process at once; it loads, waits, and ends with the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.runtime import planner_process as processes
from fcp_cli.runtime.planner_process import planner_process, start_early
from fcp_cli.util.processes import ProcessIdentity
from tests.patience import PATIENCE_SECONDS, wait_until


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The command lines of processes in place of which none is started."""
    commands: list[list[str]] = []

    def start(command: list[str], **_: Any) -> list[str]:
        commands.append(command)
        return command

    monkeypatch.setattr(subprocess, "Popen", start)
    yield commands
    processes._waiting.clear()


def test_rank_0_of_a_job_without_a_plan_starts_its_planner_early_and_uses_it_once(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"FCP_PLAN": str(tmp_path / "plan.parquet"), "FCP_PLANNING": str(tmp_path / "planning.json"), "RANK": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)

    start_early(job | {"RANK": "1"})
    assert started == []
    start_early(job)
    assert [command[-2:] for command in started] == [["fcp_cli.planning", "early"]]
    planner_process()
    assert len(started) == 1
    planner_process()  # of a second trainer
    assert started[1][-1] == "fcp_cli.planning"


@pytest.mark.parametrize("has", ["a plan", "a plan that was made before"])
def test_a_job_that_has_a_plan_starts_no_planner(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: str
) -> None:
    plan = tmp_path / "plan.parquet"
    plan.touch()
    job = {"FCP_PLAN": str(plan), "RANK": "0"}
    if has != "a plan":
        job["FCP_PLANNING"] = str(tmp_path / "planning.json")
    for name, value in job.items():
        monkeypatch.setenv(name, value)

    start_early(job)

    assert started == []


@pytest.mark.processes
def test_an_early_planner_that_nobody_asks_loads_no_library_that_it_does_not_need_and_ends_in_silence() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv = ['fcp_cli.planning', 'early']\n"
        "runpy.run_module('fcp_cli.planning', run_name='__main__')\n"
        "print(sorted({'pandas', 'scipy.linalg', 'torch'} & set(sys.modules)), 'fcp_cli.planning.job_plan' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "[] True\n", "")


_RANK = """
import os, sys, time
from fcp_cli.runtime.planner_process import start_early, _waiting
start_early({**os.environ, "RANK": "0"})
print(_waiting[0].pid, flush=True)
if os.fork():  # the child holds the pipe, like a worker of a data loader
    os.close(1)
time.sleep(60)
"""


@pytest.mark.processes
def test_a_planner_that_compiles_ends_as_soon_as_its_rank_is_killed(tmp_path: Path) -> None:
    job = {
        "FCP_PLAN": str(tmp_path / "plan.parquet"),
        "FCP_PLANNING": str(tmp_path / "planning.json"),
        "NUMBA_CACHE_DIR": str(tmp_path),
        "NUMBA_CPU_NAME": "host",  # the wheel has no kernels for it
    }
    with subprocess.Popen(
        [sys.executable, "-c", _RANK],
        env={**os.environ, **job},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as rank:
        try:
            assert rank.stdout is not None
            planner = ProcessIdentity.of(int(rank.stdout.readline()))
            assert planner is not None
            wait_until(lambda: any(tmp_path.rglob(".*.lock")))  # it compiles the first of many kernels
            rank.kill()
            killed = time.monotonic()
            wait_until(lambda: not planner.is_running())
            assert time.monotonic() - killed < 2.0
            assert not any(tmp_path.rglob("timelines.schedule-*.nbi"))
        finally:
            os.killpg(rank.pid, signal.SIGKILL)
