"""Answer Ctrl-C and a scheduler's SIGTERM during training: finish the step, save, leave."""

from __future__ import annotations

import os
import signal
import socket
from threading import Thread
from types import FrameType

from fcp_cli.machine import processes


class StopRequest:
    """A flag that the first SIGINT sets, and each SIGTERM; a second SIGINT ends the process at once.

    The ranks agree on it at the end of each step, since the signal may reach them in different steps.

    torchrun passes a scheduler's SIGTERM on, but sends the same signal to the ranks that wait for one that failed.
    Those have no step to finish, and may hang in a collective, in which no Python handler ever runs: so a thread sees
    each signal as it comes, and if a rank of this node is gone, SIGTERM ends the process as it would without a handler.
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
    """Leave a process that a rank forks, as one that reads data, to the signals' ordinary effects."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _watch(received: socket.socket) -> None:
    while number := received.recv(1):
        if number[0] == signal.SIGTERM and _lost_a_rank():
            _end_by(signal.SIGTERM)


def _lost_a_rank() -> bool:
    """Return whether one of the ranks that torchrun started on this node is gone."""
    started = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if started == 1:
        return False
    siblings = processes.children(os.getppid())
    return sum("LOCAL_RANK" in processes.environment_of(pid) for pid in siblings) < started


def _end_by(number: signal.Signals) -> None:
    """Kill this process by the signal's default action. Python can reset handlers in its main thread only."""
    from ctypes import CDLL

    CDLL(None).signal(int(number), 0)
    os.kill(os.getpid(), number)
