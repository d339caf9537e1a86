"""Stops a job at the end of a step: one request for all ways to train, agreed on by all ranks before a checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import threading
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

from fcp_cli.util import processes

if TYPE_CHECKING:
    from fcp_cli.runtime.transport import World

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a rank that was stopped, by which other nodes know that the job did not fail."""


class StopRequest:
    """A flag set by `processes.STOP` of `fcp launch`, by SIGTERM, or by SIGINT, of which a second ends the process.

    A handler of the script's own for SIGTERM or SIGINT is kept.

    torchrun forwards a scheduler's SIGTERM, but also sends SIGTERM to ranks that wait for a failed one. Those have no
    step to finish, and may hang in a collective, where no Python handler runs. So a thread watches signals, and if a
    rank of this node is gone, SIGTERM ends the process as without a handler.
    """

    def __init__(self) -> None:
        self._made = False
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __bool__(self) -> bool:
        return self._made

    def install(self) -> StopRequest:
        """Handle the signals until `release`; without effect in other threads than the main one."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (processes.STOP, signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if before in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
                self._before[number] = before
                signal.signal(number, self._request_stop)
        if signal.SIGTERM in self._before:
            reader, writer = socket.socketpair()
            writer.setblocking(False)
            self._wakeup = writer.detach()
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
        os.register_at_fork(after_in_child=self.release)  # for example in a data loader's worker
        return self

    def agreed(self, world: World) -> bool:
        """Return whether any rank was asked to stop, equal on all ranks. Every rank calls it after the same step.

        The signal may reach ranks in different steps. Exchanged between hosts, so that no accelerator waits.
        """
        import torch  # not before the signals are handled

        asked = torch.tensor([int(self._made)], dtype=torch.int64, device="cpu")
        world.start_sum(asked).wait()
        return bool(asked.item())

    def release(self) -> None:
        """Restore the handlers."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()
        if self._wakeup >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup)
            self._wakeup = -1

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._made = True
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)


def stopping() -> bool:
    """Return whether a training loop must save a checkpoint and end, equal on all ranks. Collective.

    Call it after every optimizer step. It is True from the step on in which `fcp launch`, a scheduler or Ctrl-C asked
    any rank to stop. A script that never calls it is interrupted, without a checkpoint.
    """
    import torch.distributed as dist

    request, world = _of_loop()
    return request.agreed(world) if dist.is_initialized() else bool(request)


@cache
def _of_loop() -> tuple[StopRequest, World]:
    from fcp_cli.runtime.transport import ProcessWorld

    return StopRequest().install(), ProcessWorld()


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
