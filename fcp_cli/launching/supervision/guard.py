"""Ends a launcher and its ranks when fcp is gone: `kill -9`, or a kernel short of memory, leaves it no time to.

A separate program, started before the launcher: fcp holds the other end of its standard input, which the system
closes when fcp ends, however that comes. Unlike a death signal of the kernel (PR_SET_PDEATHSIG), this needs no code
between fork and exec, does not hang on the thread that started the launcher, and lets the ranks end their step: of a
SIGTERM, msrun dies without its ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fcp_cli.launching.supervision.msrun_ranks import ranks_of
from fcp_cli.machine import processes, started_by

_POLL_SECONDS = 0.2


@contextmanager
def guarded(argv: Sequence[str], *, log_dir: Path, grace_seconds: float) -> Iterator[Callable[[int], None]]:
    """Start a guard; the launcher whose process the yielded function is given does not outlive this process.

    Args:
        argv: the argv of the launcher.
        log_dir: the folder into which it puts the ranks' output.
        grace_seconds: the grace seconds that the ranks have for their step, once they are asked to stop.
    """
    guard = subprocess.Popen(
        [sys.executable, "-m", "fcp_cli.launching.supervision.guard"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # neither Ctrl-C nor a signal to fcp's process group ends it
    )
    stdin = guard.stdin
    assert stdin is not None

    def watch_over(pid: int) -> None:
        launcher = {"pid": pid, "started": processes.started_ticks(pid), "argv": list(argv)}
        job = {
            "log_dir": str(log_dir.absolute()),
            "grace_seconds": grace_seconds,
            "mark": started_by.mark_of(os.getpid()),
        }
        line = json.dumps({**launcher, **job})
        with suppress(BrokenPipeError):  # the guard was ended: the job continues without it
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    try:
        yield watch_over
    finally:
        guard.kill()  # before its input closes
        with suppress(BrokenPipeError):
            stdin.close()
        guard.wait()


def main() -> None:
    """Wait for the end of fcp, then ask the ranks that it started to stop, and end everything when they have."""
    line = sys.stdin.readline()
    sys.stdin.read()  # returns when fcp has ended
    if not line.endswith("\n"):  # fcp had not started anything
        return
    launcher = json.loads(line)
    pid, started = launcher["pid"], launcher["started"]
    ranks = ranks_of(launcher["argv"], Path(launcher["log_dir"]))

    def is_there() -> bool:
        """Return whether it runs, and no other process of its number; always False if there is no /proc."""
        return started is not None and processes.started_ticks(pid) == started

    if is_there():
        processes.send(ranks.ranks(pid), signal.SIGINT)
    end = time.monotonic() + launcher["grace_seconds"]
    while is_there() and ranks.ranks(pid) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    if is_there():
        processes.kill_tree(pid)
    started_by.end_marked(launcher["mark"])


if __name__ == "__main__":
    os.chdir("/")  # it keeps no folder busy
    main()
