"""Emulates a job's ranks as threads of one process.

Used by `fcp verify` to replay plans with many ranks; never on a cluster. On a CPU, autograd runs backward in the
calling thread, so the backward pass of a rank may wait for other ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.transport import Handle

Result = TypeVar("Result")


class Mailbox:
    """Messages between ranks of one process, in order per (sender, receiver).

    After an abort, receivers get empty messages, which rings reject.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {}
        self._aborted = False

    def between(self, sender: int, receiver: int) -> queue.SimpleQueue[Tensor]:
        """Return the queue of messages from one rank to another."""
        messages = self._queues.setdefault((sender, receiver), queue.SimpleQueue())
        if self._aborted:  # the queue may be new: release its receivers, too
            messages.put(torch.empty(0))
        return messages

    def abort(self) -> None:
        """Release all ranks that wait for a message, now or later."""
        self._aborted = True
        for messages in list(self._queues.values()):
            messages.put(torch.empty(0))


class ThreadTransport:
    """Transport of a rank that runs as a thread.

    Args:
        mailbox: shared by all ranks.
        timeout_seconds: receive timeout, so that a wrong order fails instead of hanging.
    """

    def __init__(self, mailbox: Mailbox, rank: int, timeout_seconds: float = 300.0) -> None:
        self._mailbox = mailbox
        self._rank = rank
        self._timeout_seconds = timeout_seconds

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        if send is not None:  # copied, since the ring reuses the buffer in its next hop
            self._mailbox.between(self._rank, to).put(send.detach().clone())
        return Delivery(self._mailbox, self._rank, kind, receive, source, self._timeout_seconds)


@dataclass(slots=True)
class Delivery:
    """A pending receive into a buffer; without a buffer, there is nothing to receive."""

    mailbox: Mailbox
    rank: int
    kind: str
    receive: Tensor | None
    source: int
    timeout_seconds: float

    def ready(self) -> bool:
        return self.receive is None or not self.mailbox.between(self.source, self.rank).empty()

    def wait(self) -> None:
        if self.receive is None:
            return
        try:
            message = self.mailbox.between(self.source, self.rank).get(timeout=self.timeout_seconds)
        except queue.Empty:
            raise RunError(
                f"rank {self.rank} waits for {self.kind} from rank {self.source}, which never arrives"
            ) from None
        if message.shape != self.receive.shape or message.dtype != self.receive.dtype:
            raise RunError(
                f"rank {self.rank} expects {self.kind} {tuple(self.receive.shape)} from rank {self.source}, "
                f"got {tuple(message.shape)}"
            )
        self.receive.copy_(message)


class Meeting:
    """Shared state of the ranks of one process: a barrier for collectives, a mailbox for ring messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.mailbox = Mailbox()
        self.swaps = Mailbox()
        self.slots: list[Tensor | None] = [None] * size
        self.result = torch.empty(0)

    def abort(self) -> None:
        """Release all ranks that wait for a failed one."""
        self.barrier.abort()
        self.mailbox.abort()
        self.swaps.abort()


class Done:
    """Handle of an operation that completes synchronously."""

    def wait(self) -> None:
        pass


class ThreadWorld:
    """A rank's view of a `Meeting`; implements `runtime.communication.world.World`."""

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

    def start_sum(self, tensor: Tensor) -> Done:
        self.all_reduce_sum(tensor)
        return Done()

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None:
        ThreadTransport(self._meeting.swaps, self._rank).start("word", told, to, heard, source).wait()

    def _exchange(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        meeting = self._meeting
        meeting.slots[self._rank] = tensor.detach().clone()
        if meeting.barrier.wait() == 0:  # one rank combines, in rank order, for bitwise equal results
            meeting.result = combine([slot for slot in meeting.slots if slot is not None])
        meeting.barrier.wait()
        with torch.no_grad():
            tensor.copy_(meeting.result)
        meeting.barrier.wait()  # all ranks must have read the result before the next collective


def run_ranks(size: int, run: Callable[[Meeting, int], Result]) -> list[Result]:
    """Call `run(meeting, rank)` on one thread per rank; return the results in rank order."""
    meeting = Meeting(size)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = run(meeting, rank)
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except BaseException as error:
            errors.append(error)  # the first is the cause of later ones
            meeting.abort()

    threads = [threading.Thread(target=guarded, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
