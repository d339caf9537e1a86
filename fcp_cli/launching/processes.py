"""The processes below a process, through /proc: torchrun's ranks are sessions of their own, so no group kill helps."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Every live process below `pid`, children first; empty where there is no /proc."""
    parents = _parents()
    found: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        found += generation
    return found


def children(pid: int) -> list[int]:
    """The live direct children of `pid`."""
    return [child for child, parent in _parents().items() if parent == pid]


def _parents() -> dict[int, int]:
    """Process to parent, zombies left out."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # The command name may hold anything; what follows its closing bracket does not.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    return parents


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_tree(pid: int) -> None:
    """End a process and everything below it, now. The process itself goes first, so that it starts nothing anew."""
    below = descendants(pid)
    send([pid], signal.SIGKILL)
    send(below, signal.SIGKILL)
