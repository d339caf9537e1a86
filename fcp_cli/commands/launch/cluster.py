"""Cluster jobs of `fcp launch`: prints or writes their files, or submits them to Slurm."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fcp_cli.console import note, print_json
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.launching.job.job import Job
    from fcp_cli.launching.request import LaunchRequest
    from fcp_cli.runs.launch_record import LaunchRecord
    from fcp_cli.runs.ownership import Ownership


def launch_on_cluster(job: Job, options: LaunchRequest, owned: Ownership | None) -> None:
    """Print the files of a job (--dry-run), write them (-o), or write them to the run directory and start the job.

    Only Slurm jobs are started; for the other targets, the start command is printed.

    Args:
        job: the job with its cluster.
        options: the options, as typed.
        owned: the owned run directory, released before the job starts; None if nothing is written there.
    """
    from fcp_cli.launching.job.document import launch_record
    from fcp_cli.launching.targets.catalog import job_files, start_command, target_of
    from fcp_cli.runs.folder import RunPaths

    assert job.cluster is not None
    target, output = target_of(job.target), options.output
    if output is not None:
        record_path = RunPaths(run_dir=output.absolute()).launch
        job = replace(job, cluster=replace(job.cluster, record=record_path, output=output.absolute()))
    files = job_files(target, job, template=options.cluster.template)
    record, answer = launch_record(job, files), {}
    note(f"{counted(job.num_nodes, 'node')} with {counted(job.processes_per_node, 'process')} each")
    if options.dry_run:
        # A single file has no header, so that it can be piped into a file.
        headed = [f"# ---- {name}\n{text}" if len(files) > 1 else text for name, text in files.items()]
        sys.stdout.write("" if options.json else "".join(headed))
    elif output is not None:
        _write(output, {**files, RunPaths(run_dir=output).launch.name: record.text()}, force=options.force)
        note(f"start the job with: {shlex.join(start_command(target, job, output))}")
    elif owned is not None:
        answer = {"answer": _start(job, start_command(target, job, job.run_dir), files, record, owned)}
    if options.json:
        print_json({**asdict(record), **answer})


def _write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    from fcp_cli.launching.targets.write import write_files

    write_files(folder, files, overwrite=force)
    note(f"wrote {', '.join(str(folder / name) for name in files)}")


def _start(
    job: Job,
    command: tuple[str, ...],
    files: Mapping[str, str],
    record: LaunchRecord,
    owned: Ownership,
) -> str:
    """Write the files to the run directory and submit to Slurm; return sbatch's output, "" for other targets."""
    from fcp_cli.launching.checks.preflight import check_run_dir
    from fcp_cli.launching.targets.write import require_sbatch, submit
    from fcp_cli.runs.launch_record import write_launch
    from fcp_cli.runs.record import write_record

    is_slurm = job.target == "slurm"
    if is_slurm:
        require_sbatch()
    check_run_dir(job)
    write_record(job.run_dir, job.plan.absolute(), job.metadata)
    write_launch(job.run_dir, record)
    job.paths.logs.mkdir(exist_ok=True)
    _write(job.run_dir, files, force=True)  # may only replace files of this run's earlier start
    if not is_slurm:
        note(f"start the job with: {shlex.join(command)}")
        return ""
    owned.release()
    answer = submit(command)
    note(f"{answer}; its output goes to {job.paths.logs}")
    return answer
