"""Processes of tests' jobs that are forked, where each would import PyTorch.

A rank of the bundled trainer imports PyTorch and transformers for four to five seconds of processor time, and then trains
a tiny model for less than one; `fcp launch` and torchrun import for two to four each. With this folder on PYTHONPATH
torchrun's ranks are forked from a process that imported what they need: same agent, same process group, same signals, same
logs, and a process with a session of its own for each rank. With `shared()` in the environment, so are torchrun, fcp and
the planner processes of jobs without a plan, in which the compiled planner is loaded already.
Scripts, whose start fcp changes, start as users start them, but for jobs with `shared_by_scripts()`.
"""

from __future__ import annotations

import os
from pathlib import Path

from fcp_cli.util.processes import environment_of
from tests.forked_ranks.rank_forking import SCRIPTS, SHARED, server

_HERE = str(Path(__file__).parent)
# The address of the server of all workers; not the name by which a job asks to be forked.
_OF_ALL_WORKERS = "FCP_TESTS_SERVER"
# What most programs import sooner or later.
_EVERY_PROGRAM = (
    "torch.distributed.run",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "pandas",
    "peft",
    "pydantic.type_adapter",
    "rich.console",
    "torch._inductor.compile_fx",
)


def shared() -> dict[str, str]:
    """What a job's environment has for one server of all jobs to fork fcp, torchrun and its ranks.

    They are none of the job's descendants then: not for jobs that are ended by force, or looked at from outside.
    """
    return {SHARED: os.environ.get(_OF_ALL_WORKERS) or server(*_EVERY_PROGRAM)}


def share_among_workers() -> None:
    """Start the server of the workers of pytest-xdist, which then need none of their own."""
    os.environ[_OF_ALL_WORKERS] = server(*_EVERY_PROGRAM)


def shared_by_scripts() -> dict[str, str]:
    """The same for a job that runs a script: for tests of how it trains, not of how it starts."""
    return {**shared(), SCRIPTS: "1"}


def without_forks() -> dict[str, str]:
    """The environment of a job whose ranks are torchrun's own children, as a user's are: for tests of signals."""
    path = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != _HERE]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def is_rank(pid: int, rank: int) -> bool:
    """Whether a process is this rank of its job; a forked one has its agent's environment in /proc, and says so by name."""
    return (Path("/proc") / str(pid) / "comm").read_text() == f"rank {rank}\n" or environment_of(pid).get(
        "RANK"
    ) == f"{rank}"
