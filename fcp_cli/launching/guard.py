"""Guard process: stops the launcher and its ranks if fcp itself is killed (`kill -9`, or out of memory).

It is started before the launcher. fcp holds the other end of its standard input, which the kernel closes when fcp
ends for any reason. Unlike PR_SET_PDEATHSIG, this needs no code between fork and exec, does not depend on the thread
that started the launcher, and lets ranks finish their step. SIGTERM would kill msrun without its ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fcp_cli.launching.failure import ranks_of
from fcp_cli.util import processes

_POLL_SECONDS = 0.2


@contextmanager
def guarded(argv: Sequence[str], *, log_dir: Path, grace_seconds: float) -> Iterator[Callable[[int], None]]:
    """Start a guard, and yield a function that takes the launcher's pid, which then does not outlive this process.

    Args:
        argv: command of the launcher.
        log_dir: folder of the ranks' output.
        grace_seconds: time that ranks have to finish their step.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", "fcp_cli.launching.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C and signals to fcp's process group do not reach it
    )
    stdin = guard.stdin
    assert stdin is not None

    def watch_over(pid: int) -> None:
        launcher = {"pid": pid, "started": processes.started_ticks(pid), "argv": list(argv)}
        job = {
            "log_dir": str(log_dir.absolute()),
            "grace_seconds": grace_seconds,
            "mark": processes.mark_of(os.getpid()),
        }
        line = json.dumps({**launcher, **job})
        with suppress(BrokenPipeError):  # the guard was killed: the job continues without it
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    try:
        yield watch_over
    finally:
        guard.kill()  # before its input closes, which would make it stop the job
        with suppress(BrokenPipeError):
            stdin.close()
        guard.wait()


def main() -> None:
    """Wait until fcp has ended, interrupt its ranks, and kill what remains after the grace time."""
    line = sys.stdin.readline()
    sys.stdin.read()  # returns when fcp has ended
    if not line.endswith("\n"):  # fcp had not started anything
        return
    launcher = json.loads(line)
    pid, started = launcher["pid"], launcher["started"]
    ranks = ranks_of(launcher["argv"], Path(launcher["log_dir"]))

    def is_there() -> bool:
        """Return whether the launcher runs, and its pid was not reused; always False without /proc."""
        return started is not None and processes.started_ticks(pid) == started

    if is_there():
        number, asked = processes.stop_signal(ranks.ranks(pid))
        processes.send(asked, number)
    end = time.monotonic() + launcher["grace_seconds"]
    while is_there() and ranks.ranks(pid) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    if is_there():
        processes.kill_tree(pid)
    processes.end_marked(launcher["mark"])


if __name__ == "__main__":
    os.chdir("/")  # so that it does not keep a folder busy
    main()
