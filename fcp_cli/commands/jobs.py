"""`fcp jobs`: how the jobs that `fcp launch` started or submitted stand, what they print, and how they are ended."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fcp_cli.command_line import App, takes
from fcp_cli.console import human, note, print_json
from fcp_cli.options import Arg, Opt

jobs_app = App()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsOptions:
    """Which jobs to list."""

    runs: Annotated[Path, Opt("Folder of the runs.", metavar="DIR")] = Path("runs")
    json: Annotated[bool, Opt("Print the jobs as one JSON document on stdout.")] = False


@jobs_app.callback(invoke_without_command=True)
@takes(JobsOptions, "fcp jobs", "fcp jobs log qwen3-tiny-001")
def jobs(options: JobsOptions) -> None:
    """List the jobs that fcp launch started here or submitted to Slurm or Kubernetes, with their state.

    The state is the scheduler's word while a job waits or runs, and the run's own once it has ended.
    """
    from rich.table import Table

    from fcp_cli.launching.started.jobs import job_state, started_runs
    from fcp_cli.launching.started.outside import ThisMachine

    found = [job_state(run_dir, ThisMachine()) for run_dir in started_runs(options.runs)]
    if options.json:
        shown = [
            {"run_dir": str(job.run_dir), "where": job.where, "state": job.state, "steps": job.steps} for job in found
        ]
        print_json({"jobs": shown})
        return
    if not found:
        note(f"no job was launched into {options.runs}")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "where", "state", "steps"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "steps")
    for job in found:
        table.add_row(str(job.run_dir), job.where, job.state, str(job.steps))
    human().print(table)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneJob:
    """Which job."""

    run_dir: Annotated[Path, Arg("The run's folder, or its name below runs.")]


@jobs_app.command()
@takes(OneJob, "fcp jobs log runs/qwen3-tiny-001", "fcp jobs log qwen3-tiny-001")
def log(options: OneJob) -> None:
    """Print what a job has printed: its newest log."""
    from fcp_cli.launching.started.jobs import log_of, require_run
    from fcp_cli.launching.started.outside import ThisMachine

    sys.stdout.write(log_of(require_run(options.run_dir), ThisMachine()))


@jobs_app.command()
@takes(OneJob, "fcp jobs cancel runs/qwen3-tiny-001", "fcp jobs cancel qwen3-tiny-001")
def cancel(options: OneJob) -> None:
    """End a job; here and under Slurm its ranks finish their step and save first."""
    from fcp_cli.launching.started import jobs as started
    from fcp_cli.launching.started.outside import ThisMachine

    note(started.cancel(started.require_run(options.run_dir), ThisMachine()))
