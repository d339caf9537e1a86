"""How torchrun's agent forks a rank whose program is a module of ours.

The agent has threads, and a fork may copy a lock that one of them holds; so a process without threads forks, that of
`multiprocessing`'s forkserver.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

# What a program imports only when it runs.
_LATER = {"fcp_cli.training.train": ("fcp_cli.training.trainer", "transformers.models.qwen3.modeling_qwen3")}


def fork_ranks() -> None:
    """Replace how torchrun starts a rank."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    start = SubprocessHandler._popen

    def fork_or_start(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
        _, _, dash_m, *program = args  # python -u -m MODULE ARGS
        if dash_m != "-m" or not _is_forked(program[0]):
            return start(handler, args, env)
        logs = [log.name if log else None for log in (handler._stdout, handler._stderr)]
        return ForkedRank(program, env, logs)

    SubprocessHandler._popen = fork_or_start  # type: ignore[assignment,method-assign]


def _is_forked(module: str) -> bool:
    return module.startswith(("fcp_cli.", "tests.")) and not module.startswith("fcp_cli.runtime")


class ForkedRank:
    """A forked rank, with what torchrun asks of a `Popen`."""

    def __init__(self, program: list[str], variables: dict[str, str], logs: list[str | None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([program[0], *_LATER.get(program[0], ())])
        self.args = program
        self._process = context.Process(target=_become_rank, args=(program, variables, logs))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode


def _become_rank(program: list[str], variables: dict[str, str], logs: list[str | None]) -> NoReturn:
    """Run a module as `python -u -m` does in a session of its own, and end as an interpreter ends."""
    status = 1
    try:
        os.setsid()
        atexit._clear()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for stream, log in enumerate(logs, start=1):
            if log is not None:
                os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
        os.environ.clear()
        os.environ.update(variables)
        Path("/proc/self/comm").write_text(f"rank {variables['RANK']}")  # for `is_rank`
        _limit_threads()
        sys.argv = program
        status = _run(program[0])
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _limit_threads() -> None:
    """Use the threads that OMP_NUM_THREADS names, which libgomp read when PyTorch was imported."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _run(module: str) -> int:
    """Return the exit status of a program."""
    sys.modules.pop(module, None)  # where it was imported for all ranks, runpy would warn
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
