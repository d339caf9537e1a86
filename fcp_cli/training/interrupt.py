"""Handles Ctrl-C and a scheduler's SIGTERM during training: finish the step, save, exit."""

from __future__ import annotations

import os
import signal
import socket
from threading import Thread
from types import FrameType

from fcp_cli.util import processes


class StopRequest:
    """A flag set by the first SIGINT and by any SIGTERM; a second SIGINT ends the process at once.

    Ranks agree on it at the end of each step, since the signal may reach them in different steps.

    torchrun forwards a scheduler's SIGTERM, but also sends SIGTERM to ranks that wait for a failed one. Those have no
    step to finish, and may hang in a collective, where no Python handler runs. So a thread watches signals, and if a
    rank of this node is gone, SIGTERM ends the process as without a handler.
    """

    def __init__(self) -> None:
        self._made = False

    def __bool__(self) -> bool:
        return self._made

    def install(self) -> StopRequest:
        signal.signal(signal.SIGINT, self._request_stop)
        signal.signal(signal.SIGTERM, self._request_stop)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=_forget)
        return self

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._made = True
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)


def _forget() -> None:
    """Restore default signal handling in a forked process, for example a data loader worker."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(received: socket.socket) -> None:
    while number := received.recv(1):
        if number[0] == signal.SIGTERM and _lost_a_rank():
            _end_by(signal.SIGTERM)


def _lost_a_rank() -> bool:
    """Return whether a rank that torchrun started on this node is gone."""
    started = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if started == 1:
        return False
    siblings = processes.children(os.getppid())
    return sum("LOCAL_RANK" in processes.environment_of(pid) for pid in siblings) < started


def _end_by(number: signal.Signals) -> None:
    """Kill this process with a signal's default action; unlike Python's API, this works in any thread."""
    from ctypes import CDLL

    CDLL(None).signal(int(number), 0)
    os.kill(os.getpid(), number)
