"""A mark in the environment of everything that one fcp starts: a parent's death hides a process, its environment stays.

torchrun's ranks lead sessions of their own, and a rank whose torchrun was killed has another parent. The mark finds it.
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

_END_SECONDS = 5.0  # a killed process is gone at once, unless it waits for a disk
_POLL_SECONDS = 0.05


def mark_of(pid: int) -> str:
    """Return the value of the mark that process `pid` gives its children; no other process ever gives the same."""
    identity = ProcessIdentity.of(pid)
    return f"{pid}" if identity is None else f"{pid}-{identity.started_ticks}-{identity.boot_id}"


def marked_processes(mark: str) -> list[ProcessIdentity]:
    """Return the live processes of this machine that carry a mark; none if there is no /proc."""
    found = [ProcessIdentity.of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [one for one in found if one is not None and processes.environment_of(one.pid).get(VARIABLE) == mark]


def end_marked(mark: str) -> int:
    """Kill all processes that carry a mark, and those that they start meanwhile; return the number killed."""
    killed: set[ProcessIdentity] = set()
    end = time.monotonic() + _END_SECONDS
    while running := [one for one in marked_processes(mark) if one.pid != os.getpid()]:
        for one in running:
            with suppress(PermissionError):  # it has changed its user
                one.send(signal.SIGKILL)
        killed.update(running)
        if time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    return len(killed)
