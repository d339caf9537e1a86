"""One node's command and environment under torchrun and msrun. Pure: a job in, words out, never a text to parse.

msrun (of MindSpore) starts processes of any kind: those of a torch program run through the runtime's entry, which
reads msrun's variables. Everything that msrun would fill in by itself is stated, because its defaults are traps: eight
workers, not waiting for them, rank numbers that are not known before the rendezvous.
"""

from __future__ import annotations

import os
from pathlib import Path

from fcp_cli.launching.job import shell
from fcp_cli.launching.job.inject import through_entry
from fcp_cli.launching.job.job import Job
from fcp_cli.machine.torchrun import torchrun_argv

# How long nodes wait for each other at the start, unless --join-timeout says otherwise; msrun's own default.
CLUSTER_TIME_OUT_SECONDS = 600
# The names that msrun takes for an interpreter; anything else it takes for a script, and runs with `python`.
_INTERPRETERS = ("python", "python3")


def node_argv(job: Job, *, node_rank: int | str = 0) -> list[str]:
    """Return the command of one node; its number may be a `shell.variable`, as may be any text of the job."""
    return _msrun_argv(job, node_rank) if job.launcher == "msrun" else _torchrun_argv(job, node_rank)


def _torchrun_argv(job: Job, node_rank: int | str) -> list[str]:
    """On one node torchrun finds a free port by itself; several nodes rendezvous at master_addr:master_port."""
    meeting = ["--standalone"]
    if job.num_nodes > 1:
        meeting = [
            f"--nnodes={job.num_nodes}",
            f"--node-rank={node_rank}",
            f"--master-addr={job.master_addr}",
            f"--master-port={job.master_port}",
        ]
        if job.join_timeout_seconds is not None:
            # Its own name: a node that finds the store of another job waits there, and joins none of its ranks.
            name = f"{job.run_dir.name}-{job.metadata.plan_hash[:12]}"
            meeting += [f"--rdzv-conf=timeout={job.join_timeout_seconds}", f"--rdzv-id={name}"]
    if job.numa_binding is not None:
        meeting += [f"--numa-binding={job.numa_binding}"]
    if job.log_dir is not None:
        meeting += [f"--log-dir={job.log_dir}", "--redirects=3"]
    launcher = torchrun_argv(job.processes_per_node, python=job.python, options=meeting)
    return [*launcher, *job.program, *job.arguments]


def _msrun_argv(job: Job, node_rank: int | str) -> list[str]:
    """msrun must be on PATH, and so must the interpreter: see `path_of_python`."""
    program = [*job.program, *job.arguments]
    if job.is_bundled:  # a user's program comes with the entry, or without on purpose (MindSpore's own)
        entry, arguments = through_entry(program)
        program = [*entry, *arguments]
    return [
        "msrun",
        f"--worker_num={job.num_nodes * job.processes_per_node}",
        f"--local_worker_num={job.processes_per_node}",
        f"--node_rank={node_rank}",
        f"--master_addr={'127.0.0.1' if job.num_nodes == 1 else job.master_addr}",
        f"--master_port={job.master_port}",
        f"--log_dir={job.log_dir or job.paths.logs / f'msrun-node{node_rank}'}",
        "--join=True",
        f"--cluster_time_out={job.join_timeout_seconds or CLUSTER_TIME_OUT_SECONDS}",
        "--tail_worker_log=0",
        interpreter_name(job.python),
        *program,
    ]


def interpreter_name(python: str) -> str:
    """Return the name that msrun is to look for on PATH."""
    name = Path(python).name
    return name if name in _INTERPRETERS else _INTERPRETERS[-1]


def path_of_python(python: str, inherited: str) -> str:
    """Return PATH with the interpreter's folder in front: msrun runs the first `python` on PATH, not its own.

    Args:
        python: absolute path of the interpreter.
        inherited: PATH of the environment in which the command runs.
    """
    folder = str(Path(python).parent)
    return folder if not inherited else f"{folder}{os.pathsep}{inherited}"


def node_environment(job: Job, *, inherited_path: str | None = None) -> dict[str, str]:
    """Return the variables of a node's command.

    Args:
        job: the job to launch.
        inherited_path: PATH where the command runs, for msrun, which finds its interpreter there; None where
            `launching.node` sees to that.
    """
    environment = job.job_environment()
    if job.launcher == "msrun":
        environment["LOCAL_WORLD_SIZE"] = str(job.processes_per_node)  # torchrun sets it for its ranks, msrun does not
        if inherited_path is not None:
            environment["PATH"] = path_of_python(job.python, inherited_path)
    return environment


def shell_command(job: Job, *, node_rank: int = 0) -> str:
    """Return the command of one node with its environment, quoted: ready to paste into a POSIX shell."""
    environment = node_environment(job, inherited_path=shell.variable("PATH"))
    settings = [f"{name}={value}" for name, value in environment.items()]
    return shell.join(["env", *settings, *node_argv(job, node_rank=node_rank)])
