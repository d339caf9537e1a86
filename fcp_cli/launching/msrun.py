"""msrun's command line for a launch. Pure functions: a spec in, a list of words out.

msrun (of MindSpore) starts processes of any kind: those of a torch program run through the runtime's entry, which
reads msrun's variables. Everything that msrun would fill in by itself is stated, because its defaults are traps: eight
workers, not waiting for them, rank numbers that are not known before the job has met.
"""

from __future__ import annotations

import os
from pathlib import Path

from fcp_cli.launching.inject import through_entry
from fcp_cli.launching.spec import TRAINER, LaunchSpec

# How long nodes wait for each other at the start, unless told otherwise; msrun's own default.
CLUSTER_TIME_OUT_SECONDS = 600
# The names that msrun takes for an interpreter; anything else it takes for a script, and runs with `python`.
_INTERPRETERS = ("python", "python3")


def msrun_argv(spec: LaunchSpec, *, node_rank: int | str = 0) -> list[str]:
    """The command of one node; its number may be a `shell.variable`, as may be any text of the specification.

    msrun has to be found on PATH, and so has the interpreter: see `path_of_python`.
    """
    return [
        "msrun",
        f"--worker_num={spec.num_nodes * spec.processes_per_node}",
        f"--local_worker_num={spec.processes_per_node}",
        f"--node_rank={node_rank}",
        f"--master_addr={'127.0.0.1' if spec.num_nodes == 1 else spec.master_addr}",
        f"--master_port={spec.master_port}",
        f"--log_dir={spec.log_dir or spec.paths.logs / f'msrun-node{node_rank}'}",
        "--join=True",
        f"--cluster_time_out={spec.join_timeout_seconds or CLUSTER_TIME_OUT_SECONDS}",
        "--tail_worker_log=0",
        interpreter_name(spec.python),
        *_program(spec),
    ]


def interpreter_name(python: str) -> str:
    """What msrun is to look for on PATH."""
    name = Path(python).name
    return name if name in _INTERPRETERS else _INTERPRETERS[-1]


def path_of_python(python: str, inherited: str) -> str:
    """PATH with the interpreter's folder in front: msrun runs whatever `python` it finds first, not its own.

    Args:
        python: absolute path of the interpreter.
        inherited: PATH as it is where the command runs.
    """
    folder = str(Path(python).parent)
    return folder if not inherited else f"{folder}{os.pathsep}{inherited}"


def _program(spec: LaunchSpec) -> list[str]:
    """The bundled trainer needs the entry; a user's program comes with it, or without on purpose (MindSpore's own)."""
    program, arguments = spec.program, spec.arguments
    if program == TRAINER:
        program, arguments = through_entry((*program, *arguments))
    return [*program, *arguments]
