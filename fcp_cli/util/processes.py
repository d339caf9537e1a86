"""Process trees from /proc. torchrun's ranks lead their own sessions, so killing a process group misses them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from fcp_cli.util.validation import NonEmptyText, NonNegativeCount


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


def ending(status: int) -> str:
    """Return in words how a process ended, by its exit status or, if negative, the signal that killed it."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status}{' (out of memory?)' if status == -signal.SIGKILL else ''}"


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


def send(pids: list[int], number: int) -> None:
    """Signal each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# Asks a rank to stop at the end of its step. No framework uses it, so a handler tells that the rank will save.
STOP: Final = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


def stop_signal(ranks: list[int]) -> tuple[int, list[int]]:
    """Return the signal that asks running ranks to stop, and the ranks that get it.

    It is `STOP` for those that have a handler, which is enough, since ranks agree on it. Otherwise SIGTERM, if all
    handle it: their script saves by itself. Otherwise SIGINT, which raises KeyboardInterrupt in Python.
    """
    if agreeing := [pid for pid in ranks if _catches(pid, STOP)]:
        return STOP, agreeing
    return signal.SIGTERM if all(_catches(pid, signal.SIGTERM) for pid in ranks) else signal.SIGINT, ranks


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal; False if it has ended, and without /proc."""
    with suppress(OSError):
        for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


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


# Identity of a process: PID, start time, boot and host. A PID alone may be reused.

MOST_PROCESSES: Final = 1 << 22  # Linux's PID_MAX_LIMIT
INIT: Final = 1

ProcessNumber = Annotated[int, Meta(ge=INIT, le=MOST_PROCESSES, description="the number of a process")]
BootId = Annotated[str, Meta(pattern=r"^[0-9a-f-]{36}\Z", description="the boot id of a machine")]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """Unique identity of a process.

    Attributes:
        host: host name.
        boot_id: kernel boot id, new at each boot.
        pid: process id.
        started_ticks: clock ticks from boot to its start.
    """

    host: NonEmptyText
    boot_id: BootId
    pid: ProcessNumber
    started_ticks: NonNegativeCount

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a local process, or None if it has ended or there is no /proc."""
        boot_id, started = current_boot_id(), started_ticks(pid)
        if not boot_id or started is None:
            return None
        return cls(host=socket.gethostname(), boot_id=boot_id, pid=pid, started_ticks=started)

    @property
    def is_local(self) -> bool:
        """Whether the process belongs to this machine and its current boot."""
        return self.host == socket.gethostname() and self.boot_id == current_boot_id()

    def is_running(self) -> bool:
        """Return whether this process runs on this machine; False for other machines."""
        return self.is_local and started_ticks(self.pid) == self.started_ticks

    def send(self, number: signal.Signals) -> bool:
        """Signal the process if it is running on this machine; return whether it was.

        Raises:
            PermissionError: the process is init, or of another user.
        """
        if self.pid == INIT:
            raise PermissionError(f"process {INIT} is never signalled")
        if not hasattr(os, "pidfd_open"):
            if running := self.is_running():
                os.kill(self.pid, number)
            return running
        try:
            handle = os.pidfd_open(self.pid)
        except OSError as error:
            if not isinstance(error, ProcessLookupError):
                raise
            return False
        try:
            # Check after opening the handle, which keeps referring to the same process even if the PID is reused.
            if not self.is_running():
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def current_boot_id() -> str:
    """Return this machine's boot id, or "" if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# Environment marker that all processes started by an fcp process inherit.
#
# It also identifies ranks that the process tree misses: torchrun's ranks lead their own sessions, and are reparented
# if torchrun is killed.

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
    return [one for one in found if one is not None and environment_of(one.pid).get(VARIABLE) == mark]


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


# Defers Ctrl-C, so that it never interrupts compiled code.


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C until the block ends.

    Compiled functions call back into Python to build their result tuples; a KeyboardInterrupt raised there causes a
    segmentation fault.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # KeyboardInterrupt is not raised here anyway
        return
    held: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


# Builds torchrun command lines. Does not import torch.


ALONE: Final = ("--rdzv-backend=fcp", "--rdzv-endpoint=127.0.0.1:0")
"""torchrun's options for a job on one machine: a free port of the loopback interface (`launching.rendezvous`)."""


def meeting_options(nodes: int, *, address: str, port: int, job: str) -> list[str]:
    """Return torchrun's options for nodes that meet at node 0, without the number of each node.

    Args:
        nodes: number of nodes.
        address, port: of node 0.
        job: identity of the job: nodes with another one are refused.
    """
    return [f"--nnodes={nodes}", "--rdzv-backend=fcp", f"--rdzv-endpoint={address}:{port}", f"--rdzv-id={job}"]


def torchrun_argv(processes: int, *, python: str = sys.executable, options: Sequence[str] = ALONE) -> list[str]:
    """Return the command that starts `processes` ranks on a node; append the program and its arguments.

    torchrun runs as a module of `python`, never from PATH, which may belong to another environment.

    Args:
        processes: number of ranks on this node.
        python: interpreter of torchrun and the ranks.
        options: rendezvous and log options; by default a single node on any free port.
    """
    return [python, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *options]
