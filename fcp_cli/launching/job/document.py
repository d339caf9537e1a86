"""Launch record of a job: printed by `--json`, and stored in the run directory."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from fcp_cli.launching.job.commands import node_argv, shell_command
from fcp_cli.launching.job.inject import without_entry
from fcp_cli.launching.job.job import Job
from fcp_cli.launching.request import LOCAL
from fcp_cli.runs.folder import from_here
from fcp_cli.runs.launch_record import JobFile, LaunchRecord, NodeCommand
from fcp_cli.training.settings import TrainSettings

# Settings recorded elsewhere, or specific to one start.
_NOT_REMEMBERED = ("plan", "model", "run_dir", "manifest", "resume", "accept_unrecorded", "quiet")


def launch_record(job: Job, files: Mapping[str, str] = MappingProxyType({})) -> LaunchRecord:
    """Return the launch record of a job.

    Args:
        job: the job to launch.
        files: texts of the files of a cluster job, by name; a local job records node commands instead.
    """
    settings = job.settings
    started = [job.started_on(node) for node in range(job.num_nodes)] if job.target == LOCAL else []
    training = None
    if settings is not None:  # a resumed run inherits all non-default settings
        kept = [f for f in fields(settings) if f.name not in _NOT_REMEMBERED]
        values = {f.name: getattr(settings, f.name) for f in kept if getattr(settings, f.name) != f.default}
        training = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return LaunchRecord(
        plan=str(job.plan.absolute()),
        plan_hash=job.metadata.plan_hash,
        num_ranks=job.metadata.num_ranks,
        run_dir=str(job.run_dir),
        model=job.model,
        manifest=_manifest_of(settings),
        training=training,
        program=list(job.program) if settings is not None else without_entry([*job.program, *job.arguments]),
        target=job.target,
        launcher=job.launcher,
        num_nodes=job.num_nodes,
        processes_per_node=job.processes_per_node,
        environment=job.job_environment(),
        commands=[
            NodeCommand(node=node, argv=node_argv(each, node_rank=node), shell=shell_command(each, node_rank=node))
            for node, each in enumerate(started)
        ],
        files=[JobFile(name=name, text=text) for name, text in files.items()],
    )


def _manifest_of(settings: TrainSettings | None) -> str | tuple[str, ...] | None:
    names = () if settings is None else tuple(map(str, settings.manifest))
    return names if len(names) > 1 else next(iter(names), None)


def again_command(job: Job) -> str:
    """Return the command that restarts a script in its run directory, with the stored copy of its plan."""
    run_dir = from_here(job.run_dir)
    ranks = ["--ranks", str(job.metadata.num_ranks)]  # if the job stopped before its plan was made
    plan = ["--plan", str(from_here(job.paths.plan))] if job.paths.plan.is_file() else ranks
    words = ["--online"] if job.online is not None else plan
    if job.planning is not None and plan == ranks:  # plan the rest with the same options
        asked = {"--model": job.planning.model, "--profile": job.planning.profile}
        words += [word for flag, value in asked.items() if value is not None for word in (flag, value)]
    program = without_entry([*job.program, *job.arguments])
    return shlex.join(["fcp", "launch", *words, "--run-dir", str(run_dir), "--", *program])


def resume_command(job: Job) -> str:
    """Return the command that resumes a run, with a relative path if possible."""
    return shlex.join(["fcp", "launch", "--run-dir", str(from_here(job.run_dir)), "--resume"])
