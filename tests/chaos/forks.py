"""Start fcp, torchrun and the ranks of a job by forks of this process, as each other's own children.

Run as `-m tests.chaos.forks WORDS`, it is `fcp WORDS` whose torchrun and ranks are forked.

Importing what one job needs takes some thirty seconds of processor time, which two hundred runs do not have. Unlike the
processes of `tests.forked_ranks`, which hang below a server, these have the parents, sessions, environment and command
line that started ones have: what ends with its parent, or is looked for in /proc, behaves as it does for a user.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from tests.forked_ranks.rank_forking import name_no_events

_FORKED = ("fcp_cli", "torch.distributed.run", "fcp_cli.training.train", "fcp_cli.launching.guard")
_IMPORTED = (
    "fcp_cli.cli.app",
    "fcp_cli.launching.resolve",
    "fcp_cli.launching.checks",
    "fcp_cli.util.machine",
    "fcp_cli.planning",
    "fcp_cli.launching.commands",
    "fcp_cli.launching.supervise",
    "fcp_cli.launching.supervise",
    "fcp_cli.runtime",
    "fcp_cli.runtime.launcher",
    "fcp_cli.integrations.transformers",
    "fcp_cli.training.trainer",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "transformers.models.qwen3.modeling_qwen3",
    "pandas",
    "peft",
    "pydantic",
)
_PAD = "FCP_CHAOS_PAD"
_PAD_BYTES = 1 << 16
_MOST_FILES = 4096
_NO_STREAM = -1

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE = signature(_execute)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def make_room() -> None:
    """Replace this process by one whose command line and environment leave room for those of its forks."""
    if _PAD not in os.environ:
        os.execve(sys.executable, [*sys.orig_argv, "-" * _PAD_BYTES], {**os.environ, _PAD: "-" * _PAD_BYTES})
    del os.environ[_PAD]
    sys.argv.pop()


def fork_from_here() -> None:
    """Import what jobs need, and fork the programs of `_FORKED` from now on, wherever `subprocess` starts them."""
    for module in _IMPORTED:
        import_module(module)
    name_no_events()
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


def start_from_disk() -> None:
    """Start every program anew again."""
    subprocess.Popen._execute_child = _execute  # type: ignore[attr-defined]


def in_a_fork(do: Callable[[], None]) -> None:
    """Call a function in a process of its own: threads that it starts are none of this one, which goes on to fork."""
    _flush()
    pid = os.fork()
    if not pid:
        _leave_after(lambda: _status_of(do))
    assert os.waitpid(pid, 0)[1] == 0


def _status_of(do: Callable[[], None]) -> int:
    do()
    return 0


def _fork_or_execute(process: Any, *arguments: Any) -> None:
    given = _SIGNATURE.bind(process, *arguments).arguments
    words = [] if isinstance(given["args"], str | bytes) else [os.fsdecode(word) for word in given["args"]]
    at = words.index("-m") + 1 if words[:1] == [sys.executable] and "-m" in words[1:3] else 0
    if at and words[at] in _FORKED:
        _fork(process, words, at, given)
    else:
        _execute(process, *arguments)


def _fork(process: Any, words: list[str], at: int, given: Mapping[str, Any]) -> None:
    """Do what `subprocess.Popen._execute_child` does, without a new program."""
    _flush()
    pid = os.fork()
    if not pid:
        _leave_after(lambda: _become(words, at, given))
    process.pid = pid
    process._child_created = True
    process._close_pipe_fds(*(given[name] for name in _PIPES))


def _become(words: list[str], at: int, given: Mapping[str, Any]) -> int:
    """Run a module as `python -m` does, and return its exit status."""
    environment = dict(os.environ if given["env"] is None else given["env"])
    if given["start_new_session"]:
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR2)  # for a process that does not end: see `Job.kill`
    _take_streams((given["p2cread"], given["c2pwrite"], given["errwrite"]), given["pass_fds"])
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()
    os.environ.clear()
    os.environ.update(environment)
    _show(words, environment)
    module = words[at]
    Path("/proc/self/comm").write_text(module.rpartition(".")[2])
    if "torch" in sys.modules:  # libgomp has read OMP_NUM_THREADS as PyTorch was imported
        sys.modules["torch"].set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = [str(Path.cwd()), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [module, *words[at + 1 :]]
    if module != "fcp_cli":
        sys.modules.pop(module, None)  # or runpy would warn
    status = _run(module)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _take_streams(streams: Sequence[int], passed: Sequence[int]) -> None:
    for standard, stream in enumerate(streams):
        if stream != _NO_STREAM:
            os.dup2(stream, standard)
    first = 3
    for kept in sorted(passed):
        os.closerange(first, kept)
        first = kept + 1
    os.closerange(first, _MOST_FILES)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _leave_after(do: Callable[[], int]) -> NoReturn:
    """End a fork, which must not go on as the process that it was forked from."""
    status = 1
    try:
        atexit._clear()
        status = do()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            _flush()
        finally:
            os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show this process's command line and environment, in the memory where the first program had its own."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]  # arg_start, arg_end, env_start, env_end
    for entries, start, end in (
        ([os.fsencode(word) for word in words], places[0], places[1]),
        ([os.fsencode(f"{name}={value}") for name, value in environment.items()], places[2], places[3]),
    ):
        block = b"".join(entry + b"\0" for entry in entries)
        assert len(block) <= end - start, "no room: make_room() was not called"
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    make_room()
    fork_from_here()
    sys.exit(_run("fcp_cli"))
