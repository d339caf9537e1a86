"""Process trees from /proc. torchrun's ranks lead their own sessions, so killing a process group misses them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return all live descendants of `pid` by generation, children first; [] without /proc."""
    parents = _parents()
    found: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        found += generation
    return found


def children(pid: int) -> list[int]:
    """Return the live direct children of `pid`."""
    return [child for child, parent in _parents().items() if parent == pid]


def parent(pid: int) -> int:
    """Return the parent PID of a process, or 0 if it has none or has ended."""
    stat = _stat(pid)
    return int(stat[_PARENT]) if stat else 0


def exit_status(pid: int) -> int | None:
    """Return the exit status of another process's zombie child, or None if it is running or already reaped.

    A negative status is the number of the signal that killed it.
    """
    stat = _stat(pid)
    return os.waitstatus_to_exitcode(int(stat[_EXIT_CODE])) if stat and stat[_STATE] == "Z" else None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (SIGSTOP), not by a debugger."""
    stat = _stat(pid)
    return bool(stat) and stat[_STATE] == "T"


def leads_session(pid: int) -> bool:
    """Return whether a process is the leader of its session."""
    stat = _stat(pid)
    return bool(stat) and int(stat[_SESSION]) == pid


def started_ticks(pid: int) -> int | None:
    """Return the start of a live process in clock ticks since boot, or None if it has ended or without /proc."""
    stat = _stat(pid)
    return int(stat[_STARTED]) if stat and stat[_STATE] not in _ENDED else None


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if unreadable."""
    try:
        entries = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if unreadable."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words if word]


_HALT_SECONDS = 1.0  # a process in disk wait stops later, but is killed anyway
_ENDED = ("Z", "X")  # zombie or dead
_HALTED = ("T", "t", "Z")  # stopped, traced or zombie

# Field indices in /proc/PID/stat after the command name.
_STATE, _PARENT, _SESSION, _STARTED, _EXIT_CODE = 0, 1, 3, 19, 49


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name, which may contain spaces; [] if unreadable."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parents() -> dict[int, int]:
    """Return the parent of each process that is not a zombie."""
    stats = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return {pid: int(stat[_PARENT]) for pid, stat in stats.items() if stat and stat[_STATE] != "Z"}


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants.

    All are stopped first, since a running process could start children after the tree is read.
    """
    halted: list[int] = []
    while running := [one for one in (pid, *descendants(pid)) if one not in halted]:
        _halt(running)
        halted += running
    send(halted, signal.SIGKILL)


def _halt(pids: list[int]) -> None:
    """Stop processes and wait until all have stopped."""
    send(pids, signal.SIGSTOP)
    end = time.monotonic() + _HALT_SECONDS
    while any((stat := _stat(pid)) and stat[_STATE] not in _HALTED for pid in pids) and time.monotonic() < end:
        time.sleep(0.001)
