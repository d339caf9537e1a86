"""Ranks as threads of one process: a whole job without torch.distributed, as many ranks as there is memory for.

On a CPU, autograd runs backward in the thread that calls it, so each rank's backward may wait for the others'.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fcp_cli.runtime.transport import Mailbox

Result = TypeVar("Result")


class Meeting:
    """Where the ranks of one process meet: for collectives at a barrier, for the rings' messages in a mailbox."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.mailbox = _Mailbox()
        self.slots: list[Tensor | None] = [None] * size
        self.result = torch.empty(0)

    def abort(self) -> None:
        """Let no rank wait for one that failed."""
        self.barrier.abort()
        self.mailbox.abort()


class _Mailbox(Mailbox):
    """Once aborted, whoever receives gets an empty message, which no ring expects."""

    def __init__(self) -> None:
        super().__init__()
        self._aborted = False

    def between(self, sender: int, receiver: int) -> queue.SimpleQueue[Tensor]:
        messages = super().between(sender, receiver)
        if self._aborted:
            messages.put(torch.empty(0))
        return messages

    def abort(self) -> None:
        self._aborted = True
        for messages in list(self._queues.values()):
            messages.put(torch.empty(0))


class ThreadWorld:
    """One rank's view of a `Meeting`; a `runtime.world.World`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._exchange(tensor, lambda tensors: torch.stack(tensors).sum(dim=0))

    def broadcast(self, tensor: Tensor) -> None:
        self._exchange(tensor, lambda tensors: tensors[0])

    def _exchange(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        meeting = self._meeting
        meeting.slots[self._rank] = tensor.detach().clone()
        if meeting.barrier.wait() == 0:
            meeting.result = combine([slot for slot in meeting.slots if slot is not None])
        meeting.barrier.wait()
        with torch.no_grad():
            tensor.copy_(meeting.result)
        meeting.barrier.wait()  # nobody may start the next collective before all have read this one


def run_ranks(size: int, run: Callable[[Meeting, int], Result]) -> list[Result]:
    """Call `run(meeting, rank)` on one thread per rank; the results in rank order.

    Raises:
        Exception: what the first failing rank raised; the others are released from their collectives.
    """
    meeting = Meeting(size)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = run(meeting, rank)
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except BaseException as error:
            errors.append(error)  # the first is the cause, later ones came of it
            meeting.abort()

    threads = [threading.Thread(target=guarded, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
