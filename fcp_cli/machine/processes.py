"""The processes below a process, through /proc: torchrun's ranks are sessions of their own, so no group kill helps."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return every live process below `pid`, children first; empty if there is no /proc."""
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
    """Return the parent of a process; 0 if it has none, or is gone."""
    stat = _stat(pid)
    return int(stat[_PARENT]) if stat else 0


def exit_status(pid: int) -> int | None:
    """Return how another process's child ended, before that one has asked; None while it runs, or where it is gone.

    Negative: the signal that ended it.
    """
    stat = _stat(pid)
    return os.waitstatus_to_exitcode(int(stat[_EXIT_CODE])) if stat and stat[_STATE] == "Z" else None


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process until SIGCONT; a debugger that holds it does not count."""
    stat = _stat(pid)
    return bool(stat) and stat[_STATE] == "T"


def leads_session(pid: int) -> bool:
    """Return whether the process was started as the first of a session of its own."""
    stat = _stat(pid)
    return bool(stat) and int(stat[_SESSION]) == pid


def started_ticks(pid: int) -> int | None:
    """Return clock ticks from boot to the start of a live process, or None if there is none, or no /proc."""
    stat = _stat(pid)
    return int(stat[_STARTED]) if stat and stat[_STATE] not in _ENDED else None


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it cannot be read."""
    try:
        entries = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def command_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it cannot be read."""
    try:
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words if word]


_HALT_SECONDS = 1.0  # one that waits for a disk halts later, and is ended all the same
_ENDED = ("Z", "X")  # a zombie runs nothing any more
_HALTED = ("T", "t", "Z")  # stopped, traced, or waiting to be asked how it ended

# Places in /proc/PID/stat, counted after the command name.
_STATE, _PARENT, _SESSION, _STARTED, _EXIT_CODE = 0, 1, 3, 19, 49


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the command name, which may hold anything; empty without one."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _parents() -> dict[int, int]:
    """Return the parent of each process except zombies."""
    stats = {int(entry.name): _stat(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    return {pid: int(stat[_PARENT]) for pid, stat in stats.items() if stat and stat[_STATE] != "Z"}


def send(pids: list[int], number: signal.Signals) -> None:
    """Signal each process that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_tree(pid: int) -> None:
    """End a process and everything below it, now. All are stopped first, so that children started meanwhile are seen.

    A process that ran on would leave the children that it starts after the tree was read.
    """
    halted: list[int] = []
    while running := [one for one in (pid, *descendants(pid)) if one not in halted]:
        _halt(running)
        halted += running
    send(halted, signal.SIGKILL)


def _halt(pids: list[int]) -> None:
    """Stop processes, until none of them is in the middle of starting another."""
    send(pids, signal.SIGSTOP)
    end = time.monotonic() + _HALT_SECONDS
    while any((stat := _stat(pid)) and stat[_STATE] not in _HALTED for pid in pids) and time.monotonic() < end:
        time.sleep(0.001)
