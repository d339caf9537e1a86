"""How torchrun's agent forks a rank whose program is a module that is known here."""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

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
        for name in (program[0], *_LATER.get(program[0], ())):
            import_module(name)
        return ForkedRank(program, env, handler._stdout, handler._stderr)

    SubprocessHandler._popen = fork_or_start  # type: ignore[assignment,method-assign]


def _is_forked(module: str) -> bool:
    return module.startswith(("fcp_cli.", "tests.")) and not module.startswith("fcp_cli.runtime")


class ForkedRank(subprocess.Popen[bytes]):
    """A `Popen` that forks, and has the child run a module in place of another interpreter."""

    def __init__(self, program: list[str], env: dict[str, str], stdout: IO[str] | None, stderr: IO[str] | None) -> None:
        self.outputs = (stdout or sys.stdout, stderr or sys.stderr)
        self.variables = env
        super().__init__(program)

    def _execute_child(self, args: list[str], *_: Any) -> None:  # the part of Popen that makes the process
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(args, self.variables, *(output.fileno() for output in self.outputs))
        self._child_created = True


def _become_rank(program: list[str], variables: dict[str, str], stdout: int, stderr: int) -> NoReturn:
    """Run a module as `python -u -m` does in a session of its own, and end as an interpreter ends."""
    status = 1
    try:
        os.setsid()
        atexit._clear()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the agent's store, and the logs of other ranks
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
    """Use the threads that OMP_NUM_THREADS names, which libgomp read when the agent started."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _run(module: str) -> int:
    """Return the exit status of a program."""
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
