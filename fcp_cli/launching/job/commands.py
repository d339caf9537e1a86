"""Builds a node's argv and environment for torchrun and msrun. Pure functions of a job.

msrun (from MindSpore) can start any process; torch programs run through the runtime's entry point, which reads msrun's
variables. All msrun options are explicit, since the defaults do not fit: eight workers, no waiting for them, and ranks
unknown before the rendezvous.
"""

from __future__ import annotations

import os
from pathlib import Path

from fcp_cli.launching.job import shell
from fcp_cli.launching.job.inject import through_entry
from fcp_cli.launching.job.job import Job
from fcp_cli.machine.torchrun import torchrun_argv

# Start-up timeout of nodes unless --join-timeout is given; msrun's default.
CLUSTER_TIME_OUT_SECONDS = 600
# Names that msrun treats as interpreters; anything else is a script, run with `python`.
_INTERPRETERS = ("python", "python3")


def node_argv(job: Job, *, node_rank: int | str = 0) -> list[str]:
    """Return a node's argv; the node rank and any word of the job may contain a `shell.variable`."""
    return _msrun_argv(job, node_rank) if job.launcher == "msrun" else _torchrun_argv(job, node_rank)


def _torchrun_argv(job: Job, node_rank: int | str) -> list[str]:
    """Return the torchrun command; a single node uses a free port, several meet at master_addr:master_port."""
    options = ["--standalone"]
    if job.num_nodes > 1:
        options = [
            f"--nnodes={job.num_nodes}",
            f"--node-rank={node_rank}",
            f"--master-addr={job.master_addr}",
            f"--master-port={job.master_port}",
        ]
        if job.join_timeout_seconds is not None:
            # A name of this job: a node that finds the store of another job waits there, and joins none of its ranks.
            rdzv_id = f"{job.run_dir.name}-{job.metadata.plan_hash[:12]}"
            options += [f"--rdzv-conf=timeout={job.join_timeout_seconds}", f"--rdzv-id={rdzv_id}"]
    if job.numa_binding is not None:
        options += [f"--numa-binding={job.numa_binding}"]
    if job.log_dir is not None:
        options += [f"--log-dir={job.log_dir}", "--redirects=3"]
    launcher = torchrun_argv(job.processes_per_node, python=job.python, options=options)
    return [*launcher, *job.program, *job.arguments]


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
    environment = job.job_environment()
    if job.launcher == "msrun":
        environment["LOCAL_WORLD_SIZE"] = str(job.processes_per_node)  # torchrun sets it for its ranks, msrun does not
        if inherited_path is not None:
            environment["PATH"] = path_of_python(job.python, inherited_path)
    return environment


def shell_command(job: Job, *, node_rank: int = 0) -> str:
    """Return a node's command with its environment, quoted for pasting into a POSIX shell."""
    environment = node_environment(job, inherited_path=shell.variable("PATH"))
    settings = [f"{name}={value}" for name, value in environment.items()]
    return shell.join(["env", *settings, *node_argv(job, node_rank=node_rank)])
