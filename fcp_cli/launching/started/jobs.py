"""Find started jobs by their run directories, and ask their backend: this machine, Slurm or Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import FcpError, RunError
from fcp_cli.launching.started.backend import JobBackend
from fcp_cli.reading.documents import decode_json
from fcp_cli.runs.folder import RUNS, RunPaths
from fcp_cli.runs.owner import read_owner
from fcp_cli.runs.submission import Submission, read_submission
from fcp_cli.runs.summary import summary_of
from fcp_cli.words import one_line

_KINDS = {
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "volcano": "jobs.batch.volcano.sh",
}
# Labels by which the pods of an object are found, of node 0 first.
_LABELS = {
    "trainjob": "jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0",
    "pytorchjob": "training.kubeflow.org/job-name={name},training.kubeflow.org/replica-type=master",
    "jobset": "jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0",
    "volcano": "volcano.sh/job-name={name},volcano.sh/task-index=0",
}
# Output of local rank 0 in a start, else of its launcher.
_LOGS = ("*/*/attempt_*/0/std*.log", "*/worker_0.log", "*/torchrun.log", "*/*.log")
_OVER = ("finished", "interrupted", "failed", "dead")
_ENDED_IN_SLURM = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The current state of a job.

    Attributes:
        run_dir: the run directory.
        where: `local`, or the scheduler and the name that it gave the job; "" if the run is unreadable.
        state: of a scheduler's job its own word, or `unknown`; of a local one `not started`, `running`, `finished`,
            `interrupted`, `failed` or `dead`; `unreadable` if the run's files cannot be read.
        steps: how many steps of the plan are trained so far.
        problem: why the run is unreadable, or "".
    """

    run_dir: Path
    where: str
    state: str
    steps: int
    problem: str = ""

    @property
    def is_over(self) -> bool:
        return self.state in _OVER or self.state.startswith(_ENDED_IN_SLURM) or self.state in ("Complete", "Succeeded")


def started_runs(runs: Path = RUNS) -> list[Path]:
    """Return the run directories that `fcp launch` made, oldest first."""
    launches = sorted(runs.glob("*/launch.json"), key=lambda path: (path.lstat().st_mtime_ns, path.parent.name))
    return [path.parent for path in launches]


def require_run(run_dir: Path) -> Path:
    """Return the directory of a run, named by its path or by its name below `runs`."""
    for found in (run_dir, RUNS / run_dir):
        if RunPaths(run_dir=found).launch.is_file():
            return found
    raise RunError(f"{run_dir} is not a run that 'fcp launch' started; 'fcp jobs' lists those below {RUNS}")


def listed_state(run_dir: Path, backend: JobBackend) -> JobState:
    """Ask for the state of a job; a run with damaged files is `unreadable`, so that others are still listed."""
    try:
        return job_state(run_dir, backend)
    except RunError as error:
        return JobState(run_dir=run_dir, where="", state="unreadable", steps=0, problem=str(error))


def job_state(run_dir: Path, backend: JobBackend) -> JobState:
    """Ask for the state of a job; without an answer of the scheduler, the run's own files decide."""
    submission, owner = read_submission(run_dir), read_owner(RunPaths(run_dir=run_dir).owner_of(0))
    own: str | None = None if owner is None else owner.ended or ("dead" if owner.is_gone else "running")
    last = summary_of(RunPaths(run_dir=run_dir).metrics).last
    steps = 0 if last is None else last["step"] + 1  # those that a resumed run trained again count once
    if submission is None:
        return JobState(run_dir=run_dir, where="local", state=own or "not started", steps=steps)
    where = f"slurm {submission.job_id}" if submission.target == "slurm" else f"{submission.target} {submission.name}"
    state = own
    if own not in _OVER and submission.has_scheduler:
        with suppress(FcpError):
            state = _asked(submission, backend)
    return JobState(run_dir=run_dir, where=where, state=state or "unknown", steps=steps)


def _asked(submission: Submission, backend: JobBackend) -> str:
    if submission.target != "slurm":
        return _state_on_kubernetes(backend.run(kubectl(submission, "get", "--output=json")))
    queued = backend.run(("squeue", f"--jobs={submission.job_id}", "--noheader", "--states=all", "--format=%T %r"))
    if queued.strip():
        state, _, reason = one_line(queued.strip().splitlines()[0]).partition(" ")
        return f"{state} ({reason})" if reason not in ("", "None") else state
    ended = backend.run(
        ("sacct", f"--jobs={submission.job_id}", "--allocations", "--noheader", "--parsable2", "-oState")
    )
    return one_line(ended.strip().splitlines()[0]) if ended.strip() else "unknown"


def _state_on_kubernetes(answer: str) -> str:
    """Return the latest condition that holds of any of the kinds of objects."""
    try:
        status = decode_json(answer).get("status") or {}
        if phase := (status.get("state") or {}).get("phase"):  # of Volcano's jobs
            return one_line(phase)
        holding = [one for one in status.get("conditions") or () if one.get("status") == "True"]
        latest = max(holding, key=lambda one: str(one.get("lastTransitionTime")), default=None)  # as text they ascend
        return "Pending" if latest is None else one_line(latest["type"])
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise RunError(f"kubectl gave no object: {error}") from error


def kubectl(submission: Submission, verb: str, *options: str) -> tuple[str, ...]:
    """Return the words that act on a job's object; its name is last, so that it cannot be an option."""
    return ("kubectl", verb, *_namespace(submission), *options, "--", _KINDS[submission.target], submission.name)


def _namespace(submission: Submission) -> tuple[str, ...]:
    return (f"--namespace={submission.namespace}",) if submission.namespace else ()


def log_of(run_dir: Path, backend: JobBackend) -> Iterator[str]:
    """Return the output of a job, in pieces: its newest log, or that of node 0's pod if the run has none."""
    paths, submission = RunPaths(run_dir=run_dir), read_submission(run_dir)
    own = f"slurm-{submission.job_id}*.log" if submission is not None and submission.target == "slurm" else ""
    files = [path for path in paths.logs.glob(own) if path.is_file()] if own else []
    for pattern in _LOGS:
        files = files or [path for path in paths.logs.glob(pattern) if path.is_file() and path.stat().st_size]
    if files:
        return _pieces(max(files, key=lambda path: path.stat().st_mtime))
    if submission is None or submission.target not in _LABELS:
        raise RunError(f"{run_dir} has no output yet: there is no log in {paths.logs}")
    label = _LABELS[submission.target].format(name=submission.name)
    return iter([backend.run(("kubectl", "logs", f"--selector={label}", "--tail=-1", *_namespace(submission)))])


def _pieces(log: Path) -> Iterator[str]:
    """Yield the text of a log, which may be larger than memory."""
    with log.open(encoding="utf-8", errors="replace") as file:
        while piece := file.read(1 << 20):
            yield piece
