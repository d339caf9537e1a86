"""The part of `fcp launch` that describes a job for a cluster: prints it, writes its files, or hands it to Slurm."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fcp_cli.console import note, print_json
from fcp_cli.words import counted

if TYPE_CHECKING:
    from fcp_cli.launching.job.job import Job
    from fcp_cli.launching.targets.catalog import Target


def launch_cluster_job(
    job: Job, *, template: Path | None, output: Path | None, force: bool, dry_run: bool, json: bool
) -> None:
    """Print the files of a job (--dry-run), write them (-o), or write them into the run directory and start the job.

    Only Slurm is asked to start something; for the other targets, the command that does is told.
    """
    from fcp_cli.launching.job.document import launch_document
    from fcp_cli.launching.targets.catalog import TARGETS, job_files
    from fcp_cli.runs.folder import RunPaths
    from fcp_cli.runs.launch_record import launch_text

    assert job.cluster is not None
    target = TARGETS[job.target]
    if output is not None:
        job = replace(job, cluster=replace(job.cluster, record=RunPaths(run_dir=output.absolute()).launch))
    files = job_files(target, job, template=template)
    document = launch_document(job, files)
    note(f"{counted(job.num_nodes, 'node')} with {counted(job.processes_per_node, 'process')} each")
    if dry_run:
        if json:
            print_json(document)
        else:
            _print_files(files)
    elif output is not None:
        record = RunPaths(run_dir=output).launch.name
        _write(output, {**files, record: launch_text(document)}, force=force)
        _tell(target, output)
        if json:
            print_json(document)
    else:
        answer = _start(job, target, files)
        if json:
            print_json({**document, "answer": answer})


def _print_files(files: Mapping[str, str]) -> None:
    """One file as it is, so that it can be piped into a file; several under their names."""
    for name, text in files.items():
        if len(files) > 1:
            sys.stdout.write(f"# ---- {name}\n")
        sys.stdout.write(text)


def _write(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    from fcp_cli.launching.targets.write import write_files

    write_files(folder, files, overwrite=force)
    note(f"wrote {', '.join(str(folder / name) for name in files)}")


def _tell(target: Target, folder: Path) -> None:
    note(f"start the job with: {shlex.join(target.start(folder))}")


def _start(job: Job, target: Target, files: Mapping[str, str]) -> str:
    """Everything into the run directory, then off; returns what Slurm said, else ""."""
    from fcp_cli.launching.checks.preflight import check_run_dir
    from fcp_cli.launching.job.document import launch_document
    from fcp_cli.launching.targets.write import require_sbatch, submit
    from fcp_cli.runs.launch_record import write_launch
    from fcp_cli.runs.record import write_record

    run_dir, is_slurm = job.run_dir, job.target == "slurm"
    if is_slurm:
        require_sbatch()
    check_run_dir(run_dir, parameters=job.parameters, keep_checkpoints=job.kept_checkpoints)
    write_record(run_dir, job.plan.absolute(), job.metadata)
    write_launch(run_dir, launch_document(job, files))
    job.paths.logs.mkdir(exist_ok=True)
    _write(run_dir, files, force=True)  # of this run's own earlier start
    if not is_slurm:
        _tell(target, run_dir)
        return ""
    log = str(job.paths.logs / "slurm-%j.log").replace("%", "%%").replace("%%j", "%j")
    answer = submit(("sbatch", f"--output={log}", *target.start(run_dir)[1:]))
    note(f"{answer}; its output goes to {job.paths.logs}")
    return answer
