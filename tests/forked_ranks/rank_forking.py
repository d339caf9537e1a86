"""How torchrun's agent has its ranks forked, where their program is a module of ours, and how it is forked itself."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# The address of a server for all jobs; where there is none, an agent starts one of its own.
SHARED = "FCP_TESTS_FORKS"
# Set where ranks that run a script under a plan are forked, too.
SCRIPTS = "FCP_TESTS_FORK_SCRIPTS"
_RUNS_SCRIPTS = "fcp_cli.runtime"
_SERVER = str(Path(__file__).with_name("server.py"))


def fork_ranks() -> None:
    """Replace how torchrun starts a rank, and how it ends one."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    name_no_events()
    start, close = SubprocessHandler._popen, SubprocessHandler.close

    def fork_or_start(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
        _, _, dash_m, *program = args  # python -u -m MODULE ARGS
        if dash_m != "-m" or not _is_forked(program[0], env):
            return start(handler, args, env)
        logs = [log.fileno() if log else number for number, log in ((1, handler._stdout), (2, handler._stderr))]
        with Path(os.devnull).open() as nothing:
            streams = (nothing.fileno(), *logs)
            return fork_shared(program, env, streams) or fork(server(), program, env, streams)

    def close_if_there(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        # A rank of our own that ended waits for us; a forked one is gone before we hear of it, and we would end in its place.
        with suppress(ProcessLookupError):
            close(handler, death_sig)

    SubprocessHandler._popen = fork_or_start  # type: ignore[assignment,method-assign]
    SubprocessHandler.close = close_if_there  # type: ignore[assignment,method-assign]


def name_no_events() -> None:
    """Spare torchrun the names of events that nobody records: of each frame it asks all modules that are imported."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda *_: ""


def _is_forked(module: str, environment: Mapping[str, str]) -> bool:
    if module.startswith(_RUNS_SCRIPTS):
        return module == _RUNS_SCRIPTS and SCRIPTS in environment
    return module.startswith(("fcp_cli.", "tests."))


def go_on_forked(program: Sequence[str]) -> None:
    """Be a process that a server forks, if there is one: pass signals on, and leave with its exit status."""
    process = fork_shared(program, os.environ, (0, 1, 2))
    if process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, frame: os.kill(process.pid, number))
        status = process.wait()
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def fork_shared(program: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> ForkedProcess | None:
    """Have the server of all jobs fork a process; None for a job that has none.

    Raises:
        SystemExit: the server refuses it. To start it in another way would cost a job some ten seconds, in silence.
    """
    shared = environment.get(SHARED)
    if not shared:
        return None
    process = fork(shared, program, environment, streams)
    if process is None:
        raise SystemExit(
            f"the tests' server of forks refuses {program[0]}: a variable that modules read as they are imported differs "
            f"from the server's; run the job with an empty {SHARED}"
        )
    return process


class ForkedProcess:
    """A forked process, with what torchrun asks of a `Popen`."""

    def __init__(self, program: Sequence[str], connection: socket.socket, pid: int) -> None:
        self.args = program
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return status

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            said = self._connection.recv(16)
            self.returncode = int(said) if said else -signal.SIGKILL  # the server was ended with all that it forked
            self._connection.close()
        return self.returncode


def fork(
    address: str, program: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
) -> ForkedProcess | None:
    """Have a server fork a process: a module and its arguments, and standard streams; None where it does not."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(bytes.fromhex(address))
        request = {"program": list(program), "environment": dict(environment), "folder": str(Path.cwd())}
        socket.send_fds(connection, [json.dumps(request).encode()], streams)
        pid = connection.recv(16)
    except OSError:
        pid = b""
    if not pid:
        connection.close()
        return None
    return ForkedProcess(program, connection, int(pid))


@cache
def server(*modules: str) -> str:
    """Start a server, which ends with this process, and return its address."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # to a name without a file, which the system chooses
        listener.listen(64)
        argv = [sys.executable, _SERVER, str(listener.fileno()), *modules]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
        atexit.register(process.communicate)  # closes its standard input, at which it ends
        address: bytes = listener.getsockname()
        return address.hex()
