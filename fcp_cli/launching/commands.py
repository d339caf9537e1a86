"""Builds a node's argv and environment for torchrun and msrun. Pure functions of a job.

msrun (from MindSpore) can start any process; torch programs run through the runtime's entry point, which reads msrun's
variables. All msrun options are explicit, since the defaults do not fit: eight workers, no waiting for them, and ranks
unknown before the rendezvous.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fcp_cli import runtime
from fcp_cli.errors import RunError
from fcp_cli.launching.job import (
    METRICS_VARIABLE,
    PLAN_VARIABLE,
    PROBE_VARIABLE,
    RUN_DIR_VARIABLE,
    Job,
    Variable,
    join,
    variable,
)
from fcp_cli.launching.program import through_entry, without_entry
from fcp_cli.launching.request import LOCAL
from fcp_cli.plan.metadata import OTHER_BATCHES_VARIABLE
from fcp_cli.runs.run_dir import LAUNCH_FORMAT, RunPaths, from_here, has_followed
from fcp_cli.util.processes import ALONE, meeting_options, torchrun_argv

# Start-up timeout of nodes unless --join-timeout is given; msrun's default.
CLUSTER_TIME_OUT_SECONDS = 600
# Names that msrun treats as interpreters; anything else is a script, run with `python`.
_INTERPRETERS = ("python", "python3")


def node_argv(job: Job, *, node_rank: int | str = 0) -> list[str]:
    """Return a node's argv; the node rank and any word of the job may contain a `shell.variable`."""
    return _msrun_argv(job, node_rank) if job.launcher == "msrun" else _torchrun_argv(job, node_rank)


def _torchrun_argv(job: Job, node_rank: int | str) -> list[str]:
    """Return the torchrun command; a single node uses a free port, several meet at master_addr:master_port."""
    options = [*ALONE, f"--rdzv-id={job_identity(job)}"]
    if job.num_nodes > 1:
        options = meeting_options(
            job.num_nodes, address=str(job.master_addr), port=job.master_port, job=job_identity(job)
        )
        join_timeout = CLUSTER_TIME_OUT_SECONDS if job.join_timeout_seconds is None else job.join_timeout_seconds
        options += [f"--rdzv-conf=rank={node_rank},timeout={join_timeout}"]
    if job.numa_binding is not None:
        options += [f"--numa-binding={job.numa_binding}"]
    if job.log_dir is not None:
        options += [f"--log-dir={job.log_dir}", "--redirects=3"]
    launcher = torchrun_argv(job.processes_per_node, python=job.python, options=options)
    return [*launcher, *job.program, *job.arguments]


def job_identity(job: Job) -> str:
    """Return the name that the nodes of a job compare when they meet.

    Jobs of one plan differ by their run directories; those of containers that all see one path do not.
    """
    where = f"{job.run_dir.absolute()} {job.metadata.plan_hash}"
    return f"{job.run_dir.name}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"


def _msrun_argv(job: Job, node_rank: int | str) -> list[str]:
    """Return the msrun argv; msrun and the interpreter must be on PATH, see `path_of_python`."""
    program = [*job.program, *job.arguments]
    if job.is_bundled:  # a user's program already has the entry point, or needs none (MindSpore)
        entry, arguments = through_entry(program)
        program = [*entry, *arguments]
    join_timeout = CLUSTER_TIME_OUT_SECONDS if job.join_timeout_seconds is None else job.join_timeout_seconds
    return [
        "msrun",
        f"--worker_num={job.num_nodes * job.processes_per_node}",
        f"--local_worker_num={job.processes_per_node}",
        f"--node_rank={node_rank}",
        f"--master_addr={'127.0.0.1' if job.num_nodes == 1 else job.master_addr}",
        f"--master_port={job.master_port}",
        f"--log_dir={job.log_dir or job.paths.logs / f'msrun-node{node_rank}'}",
        "--join=True",
        f"--cluster_time_out={join_timeout}",
        "--tail_worker_log=0",
        interpreter_name(job.python),
        *program,
    ]


def interpreter_name(python: str) -> str:
    """Return the interpreter name for msrun to find on PATH."""
    name = Path(python).name
    return name if name in _INTERPRETERS else _INTERPRETERS[-1]


def path_of_python(python: str, inherited: str) -> str:
    """Return PATH with the interpreter's folder first, since msrun runs the first `python` on PATH.

    Args:
        python: absolute path of the interpreter.
        inherited: PATH where the command runs.
    """
    folder = str(Path(python).parent)
    return folder if not inherited else f"{folder}{os.pathsep}{inherited}"


def node_environment(job: Job, *, inherited_path: str | None = None) -> dict[str, str]:
    """Return the environment variables of a node's command.

    Args:
        job: the job to launch.
        inherited_path: PATH where the command runs, extended for msrun; None if `launching.node` extends it.
    """
    environment = {**job.job_environment(), **job.given}
    if job.launcher == "msrun":
        environment["LOCAL_WORLD_SIZE"] = str(job.processes_per_node)  # torchrun sets it for its ranks, msrun does not
        if inherited_path is not None:
            environment["PATH"] = path_of_python(job.python, inherited_path)
    return environment


def shell_command(job: Job, *, node_rank: int = 0) -> str:
    """Return a node's command with its environment, quoted for pasting into a POSIX shell."""
    environment = node_environment(job, inherited_path=variable("PATH"))
    settings = [f"{name}={value}" for name, value in environment.items()]
    return join(["env", *settings, *node_argv(job, node_rank=node_rank)])


# Hooks in a command that starts its own ranks, by its environment.

# Folder with a sitecustomize.py, which Python runs at start-up if the folder is on PYTHONPATH.
_SITE = Path(runtime.__file__).parent / "site"


def probe_variable(*, run_dir: Path, plan_hash: str, given: Mapping[str, str]) -> Variable:
    """Return the variable that enables the probe, a numeric comparison before the first step.

    Args:
        run_dir: run directory, whose record tells whether it has followed this plan before.
        plan_hash: hash of the plan.
        given: the user's environment.
    """
    value, source, is_given = given.get(PROBE_VARIABLE), "your environment", True
    if value is None:
        is_first = not has_followed(run_dir, plan_hash)
        source = (
            "the first run of this plan in the run directory"
            if is_first
            else "the run directory has run this plan before"
        )
        value, is_given = str(int(is_first)), False
    reason = "a tiny step on the plan's groups against one alone; wrong numbers stop the job"
    return Variable(name=PROBE_VARIABLE, value=value, reason=reason, source=source, is_given=is_given)


def hooked_environment(*, plan: Path, run_dir: Path, probe: Variable) -> dict[str, str]:
    """Return the environment that injects hooks into a command that starts its own ranks (--inject env)."""
    paths = [str(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        PLAN_VARIABLE: str(plan.absolute()),
        METRICS_VARIABLE: str(RunPaths(run_dir=run_dir.absolute()).metrics),
        RUN_DIR_VARIABLE: str(run_dir.absolute()),
        probe.name: probe.value,
        "PYTHONPATH": os.pathsep.join(paths),
    }


def become(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Replace this process with the command (exec), so that output, signals and exit status are its own."""
    try:
        os.execvpe(argv[0], argv, {**os.environ, **environment})
    except OSError as error:
        raise RunError(
            f"cannot start {argv[0]}: {error.strerror}; --inject env runs a command that starts the ranks "
            "itself, like 'bash train.sh' or 'torchrun ...'; remove it for a Python script"
        ) from error


# A job as a document: printed by `--json`, and stored in the run directory as `launch.json`.

# Settings recorded elsewhere, or specific to one start.
_NOT_REMEMBERED = ("plan", "model", "run_dir", "manifest", "resume", "accept_unrecorded", "quiet")


def document_of(job: Job, files: Iterable[str] = ()) -> dict[str, Any]:
    """Return the serialized job; `runs.run_dir.Launched` is what later commands read of it.

    Args:
        job: the job to launch.
        files: names of the files of a cluster job; a local job has the commands of its nodes instead.
    """
    settings = job.settings
    names = () if settings is None else tuple(map(str, settings.manifest))
    started = [job.started_on(node) for node in range(job.num_nodes)] if job.target == LOCAL else []
    training = None
    if settings is not None:  # a resumed run inherits all non-default settings
        kept = [f for f in fields(settings) if f.name not in _NOT_REMEMBERED]
        values = {f.name: getattr(settings, f.name) for f in kept if getattr(settings, f.name) != f.default}
        training = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    return {
        "format": LAUNCH_FORMAT,
        "plan": str(job.plan.absolute()),
        "plan_hash": job.metadata.plan_hash,
        "num_ranks": job.metadata.num_ranks,
        "run_dir": str(job.run_dir),
        "model": job.model,
        "manifest": names if len(names) > 1 else next(iter(names), None),
        "training": training,
        "program": list(job.program) if settings is not None else without_entry([*job.program, *job.arguments]),
        "target": job.target,
        "launcher": job.launcher,
        "num_nodes": job.num_nodes,
        "processes_per_node": job.processes_per_node,
        "environment": job.job_environment(),
        "commands": [
            {"node": node, "argv": node_argv(each, node_rank=node), "shell": shell_command(each, node_rank=node)}
            for node, each in enumerate(started)
        ],
        "files": [{"name": name} for name in files],
    }


def again_command(job: Job) -> str:
    """Return the command that restarts a script in its run directory, with the stored copy of its plan."""
    run_dir = from_here(job.run_dir)
    ranks = ["--ranks", str(job.metadata.num_ranks)]  # if the job stopped before its plan was made
    plan = ["--plan", str(from_here(job.paths.plan))] if job.paths.plan.is_file() else ranks
    words = ["--online"] if job.online is not None else plan
    if job.planning is not None and plan == ranks:  # plan the rest with the same options
        asked = {"--model": job.planning.model, "--profile": job.planning.profile}
        words += [word for flag, value in asked.items() if value is not None for word in (flag, value)]
    if OTHER_BATCHES_VARIABLE in job.environment:
        words.append("--accept-other-batches")
    program = without_entry([*job.program, *job.arguments])
    return shlex.join(["fcp", "launch", *words, "--run-dir", str(run_dir), "--", *program])


def resume_command(job: Job) -> str:
    """Return the command that resumes a run, with a relative path if possible."""
    return shlex.join(["fcp", "launch", "--run-dir", str(from_here(job.run_dir)), "--resume"])
