"""A process-group back end with NCCL's semantics on CPUs, for tests: what would hang there hangs here, and is named.

Operations are launched, not run: each waits in a hardware queue, in the order of its launch, and begins when it is at
the head. Nothing is buffered: a send moves no byte before its receive has begun on the other rank, a collective none
before it has begun on all ranks. Messages of one batch are one operation, in which they do not hold each other up.
By default every communicator has a queue of its own; with fewer, communicators share them, as streams do where
CUDA_DEVICE_MAX_CONNECTIONS is small. Bytes travel over gloo; who has begun what is told through torchrun's store.

It records as `fcp_cli.verification.recording` does, whose groups it extends.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fcp_cli.errors import RunError
from fcp_cli.verification.order import SEND, Operation
from fcp_cli.verification.recording import ProcessRecorder, RecordedGroup, RecordedWork

BACKEND = "rendezvous"
HANG_SECONDS = 6.0
"""How long an operation waits in a job that should hang; where none should, tests wait for longer."""
_POLL_SECONDS = (0.0002, 0.004)  # the first wait and the longest
_MOST_QUEUES = 64

Issued = tuple[Operation, Callable[[], dist.Work], RecordedWork]


class Rendezvous(ProcessRecorder):
    """The device of one process: its hardware queues, and the record of what was launched into them.

    Args:
        queues: hardware queues; None gives every communicator one of its own.
        hang_seconds: how long an operation at the head of a queue waits before the job is taken to hang.
        job: tells jobs apart that share a store.
    """

    def __init__(self, *, queues: int | None = None, hang_seconds: float = 120.0, job: str = "") -> None:
        super().__init__()
        self.job = job
        self.hang_seconds = hang_seconds
        self.error: RunError | None = None
        self._num_queues = queues
        self._queues: dict[int, _Queue] = {}
        self._streams: dict[str, int] = {}

    def make_group(self, options: Any, _: Any) -> RecordedGroup:
        return RendezvousGroup(self, options)

    def queue_of(self, communicator: str) -> _Queue:
        stream = self._streams.setdefault(communicator, len(self._streams) + 1)  # 0 is the computation's
        number = stream if self._num_queues is None else stream % self._num_queues
        if number not in self._queues:
            self._queues[number] = _Queue(self, number)
        return self._queues[number]


class RendezvousGroup(RecordedGroup):
    """A communicator, on one rank."""

    recorder: Rendezvous

    def __init__(self, device: Rendezvous, options: Any) -> None:
        super().__init__(device, options)
        self._counts: Counter[str] = Counter()

    def getBackendName(self) -> str:
        return BACKEND

    def new_work(self) -> RecordedWork:
        return _LaunchedWork(self.recorder)

    def start(self, number: int, issued: list[Issued]) -> None:
        launch = _Launch(self, tuple(issued), tuple(self._key(operation) for operation, _, _ in issued))
        self.recorder.queue_of(self.label).put(launch)

    def _key(self, operation: Operation) -> str:
        """Name the meeting of one operation: the same on all ranks whose operations meet, and of no other."""
        me = self.ranks[self.rank()]
        if operation.is_collective:
            place = "all"
        else:
            place = f"{me}>{operation.peer}" if operation.verb == SEND else f"{operation.peer}>{me}"
        self._counts[place] += 1
        what = "message" if not operation.is_collective else operation.verb
        return f"{self.id}/{place}/{self._counts[place]}/{what}/{operation.num_bytes}"


@dataclass(frozen=True, slots=True)
class _Launch:
    group: RendezvousGroup
    issued: tuple[Issued, ...]
    keys: tuple[str, ...]


class _LaunchedWork(RecordedWork):
    """Ends when its launch has run; a host that waits for it is held up as a device would be."""

    def __init__(self, device: ProcessRecorder) -> None:
        super().__init__(device)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._value: Any = None
        self._futures: list[torch.futures.Future[Any]] = []
        self._lock = threading.Lock()

    def end(self, value: Any, error: Exception | None) -> None:
        with self._lock:
            self._value, self._error = value, error
            self._ended.set()
            for future in self._futures:
                self._settle(future)

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._value)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._recorder.waited(self.number)
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def result(self) -> Any:
        self.wait()
        return self._value

    def get_future(self) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self._lock:
            if self._ended.is_set():
                self._settle(future)
            else:
                self._futures.append(future)
        return future


class _Queue:
    """A hardware queue: a thread that runs launches one after the other."""

    def __init__(self, device: Rendezvous, number: int) -> None:
        self._device = device
        self._number = number
        self._launches: queue.SimpleQueue[_Launch] = queue.SimpleQueue()
        # A connection of its own: a thread that waits for the store holds up all that share its connection.
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._store = PrefixStore(f"rendezvous {device.job}", store)
        threading.Thread(target=self._run, name=f"queue-{number}", daemon=True).start()

    def put(self, launch: _Launch) -> None:
        self._launches.put(launch)

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            launch = self._launches.get()
            error: Exception | None = self._device.error  # a device that hung runs nothing more
            values: list[Any] = [None] * len(launch.issued)
            if error is None:
                try:
                    values = self._meet(launch)
                except Exception as caught:
                    error = caught
                    if isinstance(caught, RunError):
                        self._device.error = caught
            for (_, _, work), value in zip(launch.issued, values, strict=True):
                assert isinstance(work, _LaunchedWork)
                work.end(value, error)

    def _meet(self, launch: _Launch) -> list[Any]:
        rank = dist.get_rank()
        self._store.set(f"at/{rank}/{self._number}", "; ".join(str(operation) for operation, _, _ in launch.issued))
        works: dict[int, dist.Work] = {}
        for i, (operation, start, _) in enumerate(launch.issued):
            if operation.verb != SEND:
                self._store.set(f"{launch.keys[i]}/{rank}", "begun")
                if not operation.is_collective:
                    works[i] = start()  # posted; the sender sends when it has seen that
        end, pause = time.monotonic() + self._device.hang_seconds, _POLL_SECONDS[0]
        while len(works) < len(launch.issued):
            waiting = {
                i: [f"{launch.keys[i]}/{rank}" for rank in _others(launch, operation)]
                for i, (operation, _, _) in enumerate(launch.issued)
                if i not in works
            }
            for i in [i for i, keys in waiting.items() if self._store.check(keys)]:
                works[i] = launch.issued[i][1]()
                del waiting[i]
            if waiting and time.monotonic() > end:
                raise RunError(self._hang(rank, launch, min(waiting)))
            if len(waiting) == 1:  # nothing else to start: dozens of queues that ask again and again take both cores
                (keys,) = waiting.values()
                with suppress(dist.DistStoreError):  # it is late
                    self._store.wait(keys, timedelta(seconds=max(end - time.monotonic(), 0.001)))
            elif waiting:
                time.sleep(pause)
                pause = min(1.5 * pause, _POLL_SECONDS[1])
        for i, work in works.items():
            self._finish(work, end, rank, launch, i)
        self._store.set(f"at/{rank}/{self._number}", "")
        return [_value(launch.issued[i][0], works[i]) for i in range(len(works))]

    def _finish(self, work: dist.Work, end: float, rank: int, launch: _Launch, position: int) -> None:
        left = timedelta(seconds=max(end - time.monotonic(), 1.0))
        try:
            work.wait(left)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            raise RunError(self._hang(rank, launch, position)) from error

    def _hang(self, rank: int, launch: _Launch, position: int) -> str:
        operation = launch.issued[position][0]
        missing = [r for r in _others(launch, operation) if not self._store.check([f"{launch.keys[position]}/{r}"])]
        where = [f"rank {r} is at {self._place(r)}" for r in missing or [operation.peer]]
        return f"rank {rank} hangs in queue {self._number} in {operation}: {', '.join(where)}"

    def _place(self, rank: int) -> str:
        keys = [f"at/{rank}/{number}" for number in range(_MOST_QUEUES)]
        found = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return " and ".join(filter(None, found)) or "no operation"


def _others(launch: _Launch, operation: Operation) -> tuple[int, ...]:
    """Return the ranks that have to have begun before an operation may."""
    return launch.group.ranks if operation.is_collective else (operation.peer,)


def _value(operation: Operation, work: dist.Work) -> Any:
    """Return what the operation's future gives: DDP asks for that of its reductions; gloo has none of most others."""
    return work.get_future().value() if operation.verb == "allreduce" else None
