"""Ranks as threads of one process: a whole job without torch.distributed, as many ranks as there is memory for.

On a CPU, autograd runs backward in the thread that calls it, so each rank's backward may wait for the others'.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fcp_cli.runtime.transport import Mailbox

Result = TypeVar("Result")


class Meeting:
    """Where the ranks of one process meet for collectives."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.mailbox = Mailbox()
        self.slots: list[Tensor | None] = [None] * size
        self.result = torch.empty(0)


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
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=guarded, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
