"""`fcp jobs`: status, output and cancellation of the jobs that `fcp launch` started or submitted."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fcp_cli.command_line.command import App, takes
from fcp_cli.console import note, print_always, print_json, results
from fcp_cli.errors import RunError, UsageError
from fcp_cli.options import Arg, Opt, Typed
from fcp_cli.words import one_line

jobs_app = App()


@jobs_app.callback(invoke_without_command=True)
@takes("fcp jobs", "fcp jobs log qwen3-tiny-001")
def jobs(
    *,
    runs: Annotated[Path, Opt("Folder of the runs.", metavar="DIR")] = Path("runs"),
    json: Annotated[bool, Opt("Print the jobs as one JSON document on stdout.")] = False,
) -> None:
    """List jobs of fcp launch with their state, here and on a scheduler.

    The state is the scheduler's while a job waits or runs, and the run's own once it has ended.
    """
    from rich.table import Table
    from rich.text import Text

    from fcp_cli.launching.started.backend import JobBackend
    from fcp_cli.launching.started.jobs import listed_state, started_runs

    found = [listed_state(run_dir, JobBackend()) for run_dir in started_runs(runs)]
    if json:
        print_json({"jobs": [{**asdict(job), "run_dir": str(job.run_dir)} for job in found]})
        return
    if not found:
        note(f"no job was launched into {runs}")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "where", "state", "steps"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "steps")
    for job in found:
        state = f"{job.state}: {job.problem}" if job.problem else job.state
        # A name of a folder may hold anything, rich's markup included.
        table.add_row(*(Text(one_line(cell)) for cell in (str(job.run_dir), job.where, state, str(job.steps))))
    results().print(table)


@jobs_app.command()
@takes("fcp jobs log runs/qwen3-tiny-001", "fcp jobs log qwen3-tiny-001")
def log(*, run_dir: Annotated[Path, Arg("The run's folder, or its name below runs.")]) -> None:
    """Print the newest log of a job."""
    from fcp_cli.launching.started.backend import JobBackend
    from fcp_cli.launching.started.jobs import log_of, require_run

    sys.stdout.writelines(log_of(require_run(run_dir), JobBackend()))


@jobs_app.command()
@takes("fcp jobs cancel runs/qwen3-tiny-001", "fcp jobs cancel qwen3-tiny-001 --yes")
def cancel(
    *,
    run_dir: Annotated[Path, Arg("The run's folder, or its name below runs.")],
    yes: Annotated[
        bool, Opt("End it without asking; only accepted on the command line.", flags=("--yes", "-y"))
    ] = False,
    typed: Annotated[frozenset[str], Typed()] = frozenset(),
) -> None:
    """End a job after showing it and asking; on this machine and under Slurm ranks finish their step and save first."""
    from fcp_cli.launching.started.backend import JobBackend
    from fcp_cli.launching.started.cancel import end, find_cancellation
    from fcp_cli.launching.started.jobs import require_run

    found = find_cancellation(require_run(run_dir), JobBackend())
    asks = "yes" not in typed  # a file that lies in the current folder must not answer for the user
    if asks and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError(f"there is no terminal to ask on; to end {found.job.run_dir} without being asked, add --yes")
    for line in found.describe():
        (print_always if asks else note)(line)
    if asks:
        sys.stderr.write("End it? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise RunError("nothing was cancelled")
    note(end(found, JobBackend()))
