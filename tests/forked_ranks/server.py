"""A process that has imported what jobs of tests need, and forks their processes: `server.py SOCKET_FD [MODULE...]`.

    client --- connection ---> server ---> keeper of a program, which has imported it ---> process of a job

A connection carries a request with three standard streams, then back the process's id and, at its end, its exit status.
Neither the server nor a keeper has threads, of which a fork could copy a lock. With MODULEs, which it imports first, the
server is one for all jobs of a session: a process ends when its client does. Without, it is that of one agent, whose
ranks go on without it, as torchrun's do.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

LARGEST_REQUEST = 1 << 17
# Modules read these as they are imported.
_READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCHDYNAMO", "TORCHINDUCTOR", "TORCH_COMPILE", "NUMBA_", "PYTHONWARNINGS")
# PyTorch reads it when it compiles, and sets it in the environment of every process that only asks where it would.
_READ_LATER = "TORCHINDUCTOR_CACHE_DIR"
# What a program imports only when it runs.
_LATER = {
    "fcp_cli.training.train": (
        "fcp_cli.training.trainer",
        "transformers.models.qwen3.modeling_qwen3",
        "peft",
        "pandas",
        "fcp_cli.runtime",
        "fcp_cli.training.data",
        "fcp_cli.training.weights",
        "fcp_cli.integrations.transformers",
    ),
    "fcp_cli": (
        "fcp_cli.cli.app",
        "fcp_cli.launching.resolve",
        "fcp_cli.launching.checks",
        "fcp_cli.launching.commands",
        "fcp_cli.launching.supervise",
        "fcp_cli.util.machine",
        "pandas",
    ),
    "fcp_cli.planning": ("tests.forked_ranks.loaded_planner",),
    "tests.runtime.workers.vision_worker": (
        "fcp_cli.integrations.transformers",
        "torch.distributed.fsdp",
        "transformers.models.internvl.modeling_internvl",
        "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    ),
    "fcp_cli.runtime": (
        "fcp_cli.integrations.transformers",
        "fcp_cli.runtime.inject",
        "fcp_cli.runtime.planner_process",
        "fcp_cli.runtime.rank_job",
        "pandas",
    ),
}

_PACKAGES = ("fcp_cli", "fcp_cli.planning", "fcp_cli.runtime")


def serve(listener: socket.socket, modules: list[str]) -> None:
    """Hand requests to the keepers of their programs, until the pipe on standard input ends."""
    began = _read_at_import(dict(os.environ))
    _import_what_is_there(modules)
    gc.freeze()
    keepers: dict[str, socket.socket] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)
    while sys.stdin not in (ready := [key.fileobj for key, _ in waiting.select()]):
        if listener in ready:
            connection, _ = listener.accept()
            message, handles, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
            request = json.loads(message or "{}")
            # Where its modules would read something else, the connection ends, and the client goes on by itself.
            if request and _read_at_import(request["environment"]) == began:
                name = json.dumps((request["program"][0], request["environment"].get("PYTHONPATH")))
                if name not in keepers:
                    keepers[name] = _start_keeper(request, outlived=not modules)
                socket.send_fds(keepers[name], [message], [connection.fileno(), *handles])
            for handle in handles:
                os.close(handle)
            connection.close()


def _import_what_is_there(modules: Sequence[str]) -> None:
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT) and name != _READ_LATER
    }


def _start_keeper(request: dict[str, Any], *, outlived: bool) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        os.closerange(3, theirs.fileno())  # streams of its first process among them, whose end others wait for
        os.closerange(theirs.fileno() + 1, theirs.fileno() + 64)
        _leave_after(lambda: _Keeper(request, theirs, outlived=outlived).run())
    theirs.close()
    return ours


class _Keeper:
    """Forks a program's processes, and tells their clients how they end."""

    def __init__(self, request: dict[str, Any], requests: socket.socket, *, outlived: bool) -> None:
        program: str = request["program"][0]
        sys.path[:0] = [entry for entry in _path_of(request) if entry not in sys.path]
        importlib.import_module(program)
        _import_what_is_there(_LATER.get(program, ()))
        if program == "torch.distributed.run":
            importlib.import_module("rank_forking").fork_ranks()
        if program not in _PACKAGES:
            sys.modules.pop(program, None)  # or runpy would warn
        gc.freeze()
        self._requests = requests
        self._outlived = outlived
        self._clients: dict[int, socket.socket] = {}
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(requests, selectors.EVENT_READ)
        self._waiting.register(self._woken, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            for key, _ in self._waiting.select():
                if key.fileobj is self._requests:
                    message, handles, _, _ = socket.recv_fds(self._requests, LARGEST_REQUEST, 4)
                    if not message:
                        return self._end()
                    self._fork(json.loads(message), handles)
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._tell_ends()
                elif key.data in self._clients:
                    self._waiting.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def _fork(self, request: dict[str, Any], handles: list[int]) -> None:
        connection, *streams = handles
        pid = os.fork()
        if not pid:
            _leave_after(lambda: _become(request, streams))
        client = self._clients[pid] = socket.socket(fileno=connection)
        with suppress(OSError):
            client.send(b"%d" % pid)
        if not self._outlived:
            self._waiting.register(client, selectors.EVENT_READ, pid)
        for stream in streams:
            os.close(stream)

    def _tell_ends(self) -> None:
        for pid in list(self._clients):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                client = self._clients.pop(pid)
                with suppress(KeyError):
                    self._waiting.unregister(client)
                with suppress(OSError):  # it is gone
                    client.send(b"%d" % os.waitstatus_to_exitcode(status))
                client.close()

    def _end(self) -> None:
        if not self._outlived:
            for pid in self._clients:
                os.kill(pid, signal.SIGKILL)


def _path_of(request: dict[str, Any]) -> list[str]:
    return [request["folder"], *filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))]


def _become(request: dict[str, Any], streams: list[int]) -> int:
    """Run a module as `python -u -m` does in a session of its own, and return its exit status."""
    program, environment = request["program"], request["environment"]
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
    os.closerange(3, max(streams) + 64)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(environment)
    is_rank = "RANK" in environment and program[0] != "fcp_cli.planning"  # a planner has its rank's environment
    name = f"rank {environment['RANK']}" if is_rank else program[0].rpartition(".")[2]
    Path("/proc/self/comm").write_text(name)  # for `is_rank`
    _limit_threads()
    sys.argv = program
    status = _run(program[0])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _leave_after(do: Callable[[], int | None]) -> NoReturn:
    """End a forked process, which must not go on as the one that it was forked from."""
    status = 1
    try:
        atexit._clear()
        status = do() or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _limit_threads() -> None:
    """Use the threads that OMP_NUM_THREADS names, which libgomp read when PyTorch was imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_after(lambda: serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
