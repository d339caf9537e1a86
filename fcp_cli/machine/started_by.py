"""Environment marker that all processes started by an fcp process inherit.

It also identifies ranks that the process tree misses: torchrun's ranks lead their own sessions, and are reparented if
torchrun is killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from fcp_cli.machine import processes
from fcp_cli.machine.identity import ProcessIdentity

VARIABLE: Final = "FCP_STARTED_BY"

_END_SECONDS = 5.0  # a killed process ends at once, unless in disk wait
_POLL_SECONDS = 0.05


def mark_of(pid: int) -> str:
    """Return the unique marker of the children of process `pid`."""
    identity = ProcessIdentity.of(pid)
    return f"{pid}" if identity is None else f"{pid}-{identity.started_ticks}-{identity.boot_id}"


def marked_processes(mark: str) -> list[ProcessIdentity]:
    """Return the live local processes with a marker; [] without /proc."""
    found = [ProcessIdentity.of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [one for one in found if one is not None and processes.environment_of(one.pid).get(VARIABLE) == mark]


def end_marked(mark: str) -> int:
    """Kill all processes with a marker, including any they start meanwhile; return their number."""
    killed: set[ProcessIdentity] = set()
    end = time.monotonic() + _END_SECONDS
    while running := [one for one in marked_processes(mark) if one.pid != os.getpid()]:
        for one in running:
            with suppress(PermissionError):  # a process of another user
                one.send(signal.SIGKILL)
        killed.update(running)
        if time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    return len(killed)
