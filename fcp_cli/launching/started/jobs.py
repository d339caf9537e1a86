"""Find started jobs by their run directories, and ask whoever runs them: this machine, Slurm or Kubernetes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcp_cli.errors import FcpError, RunError
from fcp_cli.launching.started.outside import Outside
from fcp_cli.reading.documents import decode_json
from fcp_cli.runs.folder import RUNS, RunPaths
from fcp_cli.runs.heartbeat import read_heartbeat
from fcp_cli.runs.submission import Submission, read_submission
from fcp_cli.runs.summary import summary_of

_KINDS = {
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "volcano": "jobs.batch.volcano.sh",
}
# Labels by which the pods of an object are found, of node 0 first.
_LABELS = {
    "pytorchjob": "training.kubeflow.org/job-name={name},training.kubeflow.org/replica-type=master",
    "jobset": "jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0",
    "volcano": "volcano.sh/job-name={name},volcano.sh/task-index=0",
}
# What local rank 0 printed in a start, else what its launcher did.
_LOGS = ("*/*/attempt_*/0/std*.log", "*/worker_0.log", "*/torchrun.log", "*/*.log")
_OVER = ("finished", "interrupted", "failed", "dead")
_ENDED_IN_SLURM = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """A job as it stands.

    Attributes:
        run_dir: of the run.
        where: `local`, or the scheduler with its own name of the job.
        state: the scheduler's word, or by its heartbeat `running`, `finished`, `interrupted`, `failed` or `dead`.
        steps: that were measured.
    """

    run_dir: Path
    where: str
    state: str
    steps: int

    @property
    def is_over(self) -> bool:
        return self.state in _OVER or self.state.startswith(_ENDED_IN_SLURM) or self.state in ("Complete", "Succeeded")


def started_runs(runs: Path = RUNS) -> list[Path]:
    """Return the run directories that `fcp launch` made, oldest first."""
    return sorted((path.parent for path in runs.glob("*/launch.json")), key=_launched)


def _launched(run_dir: Path) -> float:
    return RunPaths(run_dir=run_dir).launch.stat().st_mtime


def require_run(run_dir: Path) -> Path:
    """Return the directory of a run, named by its path or by its name below `runs`.

    Raises:
        RunError: it is none that `fcp launch` made.
    """
    for found in (run_dir, RUNS / run_dir):
        if RunPaths(run_dir=found).launch.is_file():
            return found
    raise RunError(f"{run_dir} is no run that 'fcp launch' started; 'fcp jobs' lists those below {RUNS}")


def job_state(run_dir: Path, outside: Outside) -> JobState:
    """Ask how a job stands; a scheduler that cannot be asked leaves what the run's own files tell."""
    submission, steps = read_submission(run_dir), summary_of(RunPaths(run_dir=run_dir).metrics).steps
    own = _own_state(run_dir)
    if submission is None:
        return JobState(run_dir=run_dir, where="local", state=own or "not started", steps=steps)
    where = f"slurm {submission.job_id}" if submission.target == "slurm" else f"{submission.target} {submission.name}"
    state = own
    if own not in _OVER:
        with suppress(FcpError):
            state = _asked(submission, outside)
    return JobState(run_dir=run_dir, where=where, state=state or "unknown", steps=steps)


def _own_state(run_dir: Path) -> str | None:
    """Return how a run stands by its heartbeat; None where there is none yet."""
    heartbeat = read_heartbeat(RunPaths(run_dir=run_dir).heartbeat)
    if heartbeat is None:
        return None
    return heartbeat.ended or ("dead" if heartbeat.is_gone else "running")


def _asked(submission: Submission, outside: Outside) -> str:
    if submission.target != "slurm":
        return _state_on_kubernetes(decode_json(outside.run((*_kubectl(submission, "get"), "--output=json"))))
    queued = outside.run(("squeue", f"--jobs={submission.job_id}", "--noheader", "--states=all", "--format=%T %r"))
    if queued.strip():
        state, _, reason = queued.strip().splitlines()[0].partition(" ")
        return f"{state} ({reason})" if reason not in ("", "None") else state
    ended = outside.run(
        ("sacct", f"--jobs={submission.job_id}", "--allocations", "--noheader", "--parsable2", "-oState")
    )
    return ended.strip().splitlines()[0] if ended.strip() else "unknown"


def _state_on_kubernetes(document: Any) -> str:
    """Return the latest condition that holds of any of the three kinds of objects."""
    status = document.get("status") or {}
    if phase := (status.get("state") or {}).get("phase") if isinstance(status.get("state"), dict) else None:
        return str(phase)
    holding = [one for one in status.get("conditions") or () if one.get("status") == "True"]
    latest = max(holding, key=lambda one: str(one.get("lastTransitionTime", "")), default=None)
    return str(latest["type"]) if latest is not None else "Pending"


def _kubectl(submission: Submission, verb: str) -> tuple[str, ...]:
    namespace = (f"--namespace={submission.namespace}",) if submission.namespace else ()
    return ("kubectl", verb, _KINDS[submission.target], submission.name, *namespace)


def log_of(run_dir: Path, outside: Outside) -> str:
    """Return what a job has printed: its newest log, or that of node 0's pod where the run directory holds none.

    Raises:
        RunError: there is none yet.
    """
    paths, submission = RunPaths(run_dir=run_dir), read_submission(run_dir)
    own = f"slurm-{submission.job_id}*.log" if submission is not None and submission.target == "slurm" else ""
    files = list(paths.logs.glob(own)) if own else []
    for pattern in _LOGS:
        files = files or [path for path in paths.logs.glob(pattern) if path.stat().st_size]
    if files:
        return max(files, key=lambda path: path.stat().st_mtime).read_text(encoding="utf-8", errors="replace")
    if submission is None or submission.target == "slurm":
        raise RunError(f"{run_dir} has printed nothing yet: there is no log in {paths.logs}")
    namespace = (f"--namespace={submission.namespace}",) if submission.namespace else ()
    label = _LABELS[submission.target].format(name=submission.name)
    return outside.run(("kubectl", "logs", f"--selector={label}", "--tail=-1", *namespace))


def cancel(run_dir: Path, outside: Outside) -> str:
    """End a job; return what was done. Ranks of a local run and of Slurm's save a checkpoint first.

    Raises:
        RunError: it is over, or whoever runs it cannot be asked.
    """
    state, submission = job_state(run_dir, outside), read_submission(run_dir)
    if state.is_over:
        raise RunError(f"{run_dir} is {state.state}: there is nothing to cancel")
    if submission is not None and submission.target == "slurm":
        outside.run(
            ("scancel", "--signal=TERM", "--batch", submission.job_id)
            if state.state.startswith("RUNNING")
            else ("scancel", submission.job_id)
        )
        return f"asked Slurm to end job {submission.job_id}"
    if submission is not None:
        outside.run(_kubectl(submission, "delete"))
        return f"deleted the {submission.target} {submission.name}"
    heartbeat = read_heartbeat(RunPaths(run_dir=run_dir).heartbeat)
    if heartbeat is None:
        raise RunError(f"{run_dir} has not been started: there is nothing to cancel")
    if heartbeat.host != outside.host:
        raise RunError(f"{run_dir} runs on {heartbeat.host}; cancel it there")
    outside.stop(heartbeat.pid)
    return f"asked process {heartbeat.pid} to end its step and save"
