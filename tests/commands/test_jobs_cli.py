"""`fcp jobs` on run folders of others, with programs on PATH that only note what they are told."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.machine.identity import ProcessIdentity
from tests.commands.planning_folder import assert_one_error_line, fcp

_PROGRAM = '#!/bin/sh\necho "${0##*/} $*" >> "$ARGV_LOG"\n'


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def make_run(folder: Path, name: str = "tiny-001", **files: Any) -> Path:
    run_dir = folder / "runs" / name
    run_dir.mkdir(parents=True)
    for file, document in {"launch": {}, **files}.items():
        (run_dir / f"{file}.json").write_text(json.dumps(document))
    return run_dir


def owner_of(launcher: subprocess.Popen[bytes], **changes: Any) -> dict[str, Any]:
    found = ProcessIdentity.of(launcher.pid)
    assert found is not None
    facts = {"host": found.host, "pid": found.pid, "process": asdict(found), "job": "", "mark": "mark"}
    return {"format": "fcp-owner/1", "since": "2026-01-01T00:00:00+00:00", "ended": None, **facts, **changes}


def with_programs(folder: Path) -> dict[str, str]:
    """The environment in which kubectl and Slurm's programs note their words in the file `typed`."""
    (folder / "bin").mkdir()
    for name in ("kubectl", "squeue", "sacct", "scancel"):
        (folder / "bin" / name).write_text(_PROGRAM)
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "ARGV_LOG": str(folder / "typed")}


@pytest.mark.processes
def test_a_job_is_ended_with_yes_and_shown_before(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    make_run(tmp_path, owner=owner_of(sleeper))
    done = fcp("jobs", "cancel", "tiny-001", "--yes", cwd=tmp_path)
    run, where, state, end = done.stderr.splitlines()
    assert (run, state) == ("run    runs/tiny-001", "state  running, 0 steps done")
    assert f"process {sleeper.pid} on " in where
    assert "time.sleep(600)" in where
    assert (done.returncode, end) == (0, f"asked process {sleeper.pid} to end its step and save")
    assert sleeper.wait() == -15


@pytest.mark.processes
def test_a_foreign_process_of_the_launchers_number_is_never_signalled(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    make_run(tmp_path, owner=owner_of(sleeper, process=None))
    error = assert_one_error_line(fcp("jobs", "cancel", "tiny-001", "-y", cwd=tmp_path), 1)
    assert error.replace(str(sleeper.pid), "PID") == snapshot(
        "error: runs/tiny-001: its owner.json has no start time or boot id, so process PID may be another one by now, and nothing was signalled; see 'ps -fp PID', and if it is this run's launcher: kill -TERM PID"
    )
    assert sleeper.poll() is None


@pytest.mark.processes
@pytest.mark.parametrize("allowed_by", [{}, {"FCP_JOBS_CANCEL_YES": "1"}, "fcp.yaml"])
def test_without_a_terminal_nothing_is_ended_unless_yes_is_typed(
    tmp_path: Path,
    sleeper: subprocess.Popen[bytes],
    allowed_by: dict[str, str] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_run(tmp_path, owner=owner_of(sleeper))
    if isinstance(allowed_by, str):
        (tmp_path / allowed_by).write_text("jobs: {cancel: {'yes': true}}\n")
        allowed_by = {}
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    error = assert_one_error_line(fcp("jobs", "cancel", "tiny-001", cwd=tmp_path, **allowed_by), 2)
    assert error == snapshot(
        "error: there is no terminal to ask on; to end runs/tiny-001 without being asked, add --yes"
    )
    assert sleeper.poll() is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.processes
def test_on_a_terminal_the_answer_decides(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, owner=owner_of(sleeper))
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        refused = fcp("-q", "jobs", "cancel", "tiny-001", cwd=tmp_path)
        assert refused.returncode == 1
        assert refused.stderr.startswith("run    runs/tiny-001\nwhere  process ")
        assert sleeper.poll() is None
    assert refused.stderr.splitlines()[-1] == snapshot("End it? [y/N] error: nothing was cancelled")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert fcp("jobs", "cancel", "tiny-001", cwd=tmp_path).returncode == 0
    assert sleeper.wait() == -15


@pytest.mark.processes
@pytest.mark.parametrize(
    "job",
    [
        {"target": "pytorchjob", "name": "--all", "namespace": "prod"},
        {"target": "slurm", "name": "tiny", "job_id": "--user=root"},
    ],
)
@pytest.mark.parametrize("words", [("cancel", "tiny-001", "--yes"), ("log", "tiny-001")])
def test_values_that_are_options_never_reach_a_command(
    tmp_path: Path, job: dict[str, str], words: tuple[str, ...]
) -> None:
    make_run(tmp_path, job={"format": "fcp-job/1", **job})
    assert_one_error_line(fcp("jobs", *words, cwd=tmp_path, **with_programs(tmp_path)), 1)
    assert not (tmp_path / "typed").exists()


@pytest.mark.processes
def test_names_stand_behind_two_dashes(tmp_path: Path) -> None:
    make_run(tmp_path, job={"format": "fcp-job/1", "target": "volcano", "name": "tiny", "namespace": "prod"})
    fcp("jobs", "cancel", "tiny-001", "--yes", cwd=tmp_path, **with_programs(tmp_path))
    last = (tmp_path / "typed").read_text().splitlines()[-1]
    assert last == "kubectl delete --namespace=prod -- jobs.batch.volcano.sh tiny"


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path, "bad[red]-001", job={"format": "fcp-job/1", "target": ["x"], "name": "a"})
    make_run(tmp_path, "good-001")
    found = json.loads(fcp("jobs", "--json", cwd=tmp_path).stdout)["jobs"]
    assert found == snapshot(
        [
            {
                "run_dir": "runs/bad[red]-001",
                "where": "",
                "state": "unreadable",
                "steps": 0,
                "problem": "runs/bad[red]-001/job.json is damaged: target is ['x']; it must be a target of fcp launch",
            },
            {"run_dir": "runs/good-001", "where": "local", "state": "not started", "steps": 0, "problem": ""},
        ]
    )
    shown = fcp("jobs", cwd=tmp_path, COLUMNS="200")
    assert (shown.returncode, shown.stdout.splitlines()[1:]) == snapshot(
        (
            0,
            [
                "runs/bad[red]-001         unreadable: runs/bad[red]-001/job.json is damaged: target is ['x']; it must be a target of fcp launch  0    ",
                "runs/good-001      local  not started                                                                                            0    ",
            ],
        )
    )


def test_steps_that_a_resumed_run_trained_again_count_once(tmp_path: Path) -> None:
    step = {"kind": "step", "loss": 1.0, "tokens": 8, "seconds": 1.0, "predicted_seconds": 1.0, "idle_fraction": 0.0}
    records = [{**step, "step": number, "ranks": []} for number in (0, 1, 2, 1, 2, 3)]
    run_dir = make_run(tmp_path)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    jobs = json.loads(fcp("jobs", "--json", cwd=tmp_path).stdout)["jobs"]
    assert [job["steps"] for job in jobs] == [4]
