"""Ends a job: first names its processes or its scheduler's job, then asks the user."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.launching.started.backend import JobBackend
from fcp_cli.launching.started.jobs import JobState, job_state, kubectl
from fcp_cli.machine.identity import INIT, ProcessIdentity
from fcp_cli.runs.folder import RunPaths
from fcp_cli.runs.owner import Owner, read_owner
from fcp_cli.runs.submission import Submission, read_submission
from fcp_cli.words import counted, one_line

_MOST_COMMAND = 120  # characters of a process's command line that are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancellation:
    """A job that may be ended now.

    Attributes:
        job: the job in its current state.
        runs: the job of a scheduler, or the process of this machine that launched it.
    """

    job: JobState
    runs: Submission | ProcessIdentity

    def describe(self) -> list[str]:
        """Return lines that name the run, who runs it, and how far it is."""
        return [
            f"run    {self.job.run_dir}",
            f"where  {self._where()}",
            f"state  {self.job.state}, {counted(self.job.steps, 'step')} done",
        ]

    def _where(self) -> str:
        if isinstance(self.runs, ProcessIdentity):
            command = one_line(shlex.join(self.runs.command()), most=_MOST_COMMAND)
            return f"process {self.runs.pid} on {self.runs.host}: {command}"
        if self.runs.target == "slurm":
            return f"Slurm job {self.runs.job_id} ({self.runs.name})"
        namespace = f"namespace {self.runs.namespace}" if self.runs.namespace else "kubectl's current namespace"
        return f"{self.runs.target} {self.runs.name} in {namespace}"


def find_cancellation(run_dir: Path, backend: JobBackend) -> Cancellation:
    """Return the processes or jobs that cancelling would end, without ending them."""
    job, submission = job_state(run_dir, backend), read_submission(run_dir)
    if job.is_over:
        raise RunError(f"{run_dir} is {job.state}: there is nothing to cancel")
    if submission is not None and submission.has_scheduler:
        return Cancellation(job=job, runs=submission)
    owner = read_owner(RunPaths(run_dir=run_dir).owner_of(0))
    if owner is None:
        raise RunError(f"{run_dir} has not been started: there is nothing to cancel")
    return Cancellation(job=job, runs=_launcher(run_dir, owner, backend))


def _launcher(run_dir: Path, owner: Owner, backend: JobBackend) -> ProcessIdentity:
    """Return the process that launched a run of this machine."""
    launcher = owner.process
    host, pid = (owner.host, owner.pid) if launcher is None else (launcher.host, launcher.pid)
    if host != backend.host:
        raise RunError(f"{run_dir} runs on {host}; cancel it there")
    if pid == INIT:
        raise RunError(f"{run_dir} was launched by process {INIT}, the first of its container; stop the container")
    if launcher is None:
        raise RunError(
            f"{run_dir}: its owner.json has no start time or boot id, so process {pid} may be another one by now, and "
            f"nothing was signalled; see 'ps -fp {pid}', and if it is this run's launcher: kill -TERM {pid}"
        )
    if not launcher.is_local:
        raise RunError(
            f"{run_dir} was launched before the last boot of {host}, or on another machine of that name; "
            "nothing was signalled. If it runs there, cancel it there"
        )
    if not launcher.is_running():
        raise RunError(f"{run_dir}: its launcher, process {pid}, has ended: there is nothing to cancel")
    return launcher


def end(cancellation: Cancellation, backend: JobBackend) -> str:
    """End a job; return the actions taken. Ranks of a local run and of Slurm's save a checkpoint first."""
    runs, job = cancellation.runs, cancellation.job
    if isinstance(runs, ProcessIdentity):
        try:
            signalled = backend.stop(runs)
        except PermissionError as error:
            raise RunError(
                f"{job.run_dir} was launched by another user as process {runs.pid}; ask that user to cancel it"
            ) from error
        if not signalled:
            raise RunError(f"{job.run_dir}: its launcher, process {runs.pid}, has ended meanwhile")
        return f"asked process {runs.pid} to end its step and save"
    if runs.target == "slurm":
        saves = ("--signal=TERM", "--batch") if job.state.startswith("RUNNING") else ()
        backend.run(("scancel", *saves, "--", runs.job_id))
        return f"asked Slurm to end job {runs.job_id}"
    backend.run(kubectl(runs, "delete"))
    return f"deleted the {runs.target} {runs.name}"
