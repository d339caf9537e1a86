"""`fcp jobs`: what becomes of started and submitted jobs, with the world outside played by one small class."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fcp_cli.errors import RunError
from fcp_cli.launching.started.jobs import cancel, job_state, log_of, require_run, started_runs
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.heartbeat import End, beating
from fcp_cli.runs.submission import Submission, write_submission


@dataclass
class Cluster:
    """Programs answer what they are told to; without an answer they are not there."""

    answers: dict[str, str] = field(default_factory=dict)
    typed: list[list[str]] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    host: str = os.uname().nodename

    def run(self, argv: Sequence[str]) -> str:
        self.typed.append(list(argv))
        if argv[0] not in self.answers:
            raise RunError(f"there is no {argv[0]} on this machine; ask where the job was submitted from")
        return self.answers[argv[0]]

    def stop(self, pid: int) -> None:
        self.stopped.append(pid)


def run_of(folder: Path, submission: Submission | None = None, *, ended: End | None = None) -> Path:
    """A run directory as `fcp launch` leaves it; ended by its heartbeat, where that is given."""
    run_dir = folder / "runs" / "tiny-001"
    (run_dir / "logs").mkdir(parents=True)
    RunPaths(run_dir=run_dir).launch.write_text("{}")
    if submission is not None:
        write_submission(run_dir, submission)
    if ended is not None:
        with beating(RunPaths(run_dir=run_dir).heartbeat) as pulse:
            pulse.ended = ended
    return run_dir


SLURM = Submission(target="slurm", name="tiny-001", job_id="4711")
JOBSET = Submission(target="jobset", name="tiny-001", namespace="training")


def test_a_waiting_job_has_slurms_word_and_reason(tmp_path: Path) -> None:
    cluster = Cluster({"squeue": "PENDING Resources\n"})
    state = job_state(run_of(tmp_path, SLURM), cluster)
    assert (state.where, state.state, state.is_over) == ("slurm 4711", "PENDING (Resources)", False)
    assert cluster.typed[0][:2] == ["squeue", "--jobs=4711"]


def test_a_job_that_left_the_queue_is_found_in_the_accounts(tmp_path: Path) -> None:
    state = job_state(run_of(tmp_path, SLURM), Cluster({"squeue": "", "sacct": "CANCELLED by 1000\n"}))
    assert (state.state, state.is_over) == ("CANCELLED by 1000", True)


def test_a_run_that_ended_needs_no_scheduler(tmp_path: Path) -> None:
    assert job_state(run_of(tmp_path, SLURM, ended="finished"), Cluster()).state == "finished"


def test_where_the_scheduler_cannot_be_asked_the_state_is_unknown(tmp_path: Path) -> None:
    assert job_state(run_of(tmp_path, SLURM), Cluster()).state == "unknown"


def test_the_latest_condition_that_holds_is_the_state_on_kubernetes(tmp_path: Path) -> None:
    conditions = [
        {"type": "StartupPolicyCompleted", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "Completed", "status": "True", "lastTransitionTime": "2026-01-01T02:00:00Z"},
        {"type": "Failed", "status": "False", "lastTransitionTime": "2026-01-01T03:00:00Z"},
    ]
    cluster = Cluster({"kubectl": json.dumps({"status": {"conditions": conditions}})})
    assert job_state(run_of(tmp_path, JOBSET), cluster).state == "Completed"
    assert cluster.typed == [
        ["kubectl", "get", "jobsets.jobset.x-k8s.io", "tiny-001", "--namespace=training", "--output=json"]
    ]


def test_volcano_has_a_phase_and_a_new_object_nothing_yet(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, Submission(target="volcano", name="tiny-001"))
    assert job_state(run_dir, Cluster({"kubectl": '{"status": {"state": {"phase": "Running"}}}'})).state == "Running"
    assert job_state(run_dir, Cluster({"kubectl": "{}"})).state == "Pending"


def test_slurm_ends_a_running_job_after_its_step_and_a_waiting_one_at_once(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, SLURM)
    running = Cluster({"squeue": "RUNNING None\n", "scancel": ""})
    assert cancel(run_dir, running) == "asked Slurm to end job 4711"
    assert running.typed[-1] == ["scancel", "--signal=TERM", "--batch", "4711"]
    waiting = Cluster({"squeue": "PENDING Priority\n", "scancel": ""})
    cancel(run_dir, waiting)
    assert waiting.typed[-1] == ["scancel", "4711"]


def test_an_object_is_deleted_from_its_namespace(tmp_path: Path) -> None:
    cluster = Cluster({"kubectl": "{}"})
    assert cancel(run_of(tmp_path, JOBSET), cluster) == "deleted the jobset tiny-001"
    assert cluster.typed[-1] == ["kubectl", "delete", "jobsets.jobset.x-k8s.io", "tiny-001", "--namespace=training"]


def test_a_local_run_is_asked_through_its_launcher(tmp_path: Path) -> None:
    run_dir, cluster = run_of(tmp_path), Cluster()
    with beating(RunPaths(run_dir=run_dir).heartbeat):
        assert job_state(run_dir, cluster).state == "running"
        cancel(run_dir, cluster)
        assert cluster.stopped == [os.getpid()]
        with pytest.raises(RunError, match=r"runs on .*; cancel it there$"):
            cancel(run_dir, Cluster(host="another"))


def test_what_is_over_is_not_cancelled(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"tiny-001 is failed: there is nothing to cancel$"):
        cancel(run_of(tmp_path, ended="failed"), Cluster())


def test_the_log_is_the_newest_of_rank_0_and_slurms_own_where_it_has_one(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, SLURM)
    logs = RunPaths(run_dir=run_dir).logs
    with pytest.raises(RunError, match="has printed nothing yet"):
        log_of(run_dir, Cluster())
    (logs / "slurm-4711.log").write_text("of the script\n")
    (logs / "slurm-99.log").write_text("of another job\n")
    assert log_of(run_dir, Cluster()) == "of the script\n"


def test_a_pod_is_asked_where_the_run_directory_holds_no_log(tmp_path: Path) -> None:
    cluster = Cluster({"kubectl": "step 1/4\n"})
    assert log_of(run_of(tmp_path, JOBSET), cluster) == "step 1/4\n"
    assert cluster.typed[0][2].startswith("--selector=jobset.sigs.k8s.io/jobset-name=tiny-001,")


def test_runs_are_found_by_their_path_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert started_runs() == [Path("runs/tiny-001")] == [require_run(Path("tiny-001"))]
    with pytest.raises(RunError, match="gone is no run that 'fcp launch' started; 'fcp jobs' lists those below runs"):
        require_run(Path("gone"))
