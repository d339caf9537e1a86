"""Proves that the recorded operations of all ranks cannot deadlock, without running a rank.

A successful gloo run does not show that the same order works with NCCL or HCCL: gloo buffers, they block. The recorded
operations are checked against the rules of those libraries: sends and receives match in FIFO order and size; a batch
has at most one send and one receive per peer; all ranks issue a group's collectives in the same order; and if each
batch and collective blocks until all its peers arrive, every rank finishes.

A blocking operation delays others under two models:

- *communicators*: it delays later operations on its communicator, and computation that waits for it. A plan that hangs
  under this model hangs on every device.
- *hardware queues*: streams share a limited number of queues (CUDA: 8, or CUDA_DEVICE_MAX_CONNECTIONS: 1 to 32), each
  of which starts kernels in launch order. The operation also delays everything launched after it in its queue, on other
  communicators and computation, until it ends. (A real device releases the queue when the operation starts; only the
  next kernel of its stream blocks it. This model is stricter.)

With a single queue, a rank runs operations strictly in issue order. More queues only remove waits, so an order that
finishes with one queue finishes on every device; `check_order` tries that first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from fcp_cli.errors import RunError

SEND, RECEIVE = "send", "recv"
HARDWARE_QUEUES = (1, 2, 8, 32)
"""Numbers of hardware queues for which an order is checked, besides a queue per stream."""

NEVER = -1
"""Value of `Operation.waited` if the rank never waited for the operation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation that a rank issued.

    Attributes:
        group: communicator.
        verb: "send", "recv", or the name of a collective.
        batch: index of its batch, per rank.
        peer: global rank of the peer; -1 for a collective.
        num_bytes: message size.
        shape: tensor shape.
        content: "kv", "dkv", ...; only for messages.
        waited: index of the batch before which the rank waited for it, or `NEVER`. None means the next batch: the
            strictest assumption, for records without this information.
    """

    group: str
    verb: str
    batch: int
    peer: int = -1
    num_bytes: int = 0
    shape: tuple[int, ...] = ()
    content: str = ""
    waited: int | None = None

    @property
    def is_collective(self) -> bool:
        return self.verb not in (SEND, RECEIVE)

    def __str__(self) -> str:
        if self.is_collective:
            return f"{self.verb} on {self.group} ({self.num_bytes} bytes)"
        direction = "to" if self.verb == SEND else "from"
        message = f"{self.num_bytes} bytes {self.content}".rstrip()
        return f"{self.verb} {direction} rank {self.peer} on {self.group} ({message})"


Batch = tuple[Operation, ...]
Groups = Mapping[str, Sequence[int]]


def check_order(operations: Mapping[int, Sequence[Operation]], groups: Groups | None = None) -> None:
    """Check the records of all ranks; raise RunError on a violation or possible deadlock.

    Args:
        operations: operations of each global rank, in issue order.
        groups: ranks of each group, for collectives; unnamed groups contain all ranks.
    """
    batches = _batches(operations)
    for rank, issued in batches.items():
        for number, batch in enumerate(issued):
            _check_batch(rank, number, batch)
    _check_collectives(operations, groups or {})
    _check_pairs(operations)
    if _QueueRun(batches, groups or {}, queues=1).to_the_end() is None:
        return
    found = {queues: _QueueRun(batches, groups or {}, queues).to_the_end() for queues in (None, *HARDWARE_QUEUES)}
    if found[None] is not None:
        raise RunError(f"deadlock: {found[None]}")
    hanging = [queues for queues in HARDWARE_QUEUES if found[queues] is not None]
    raise RunError(f"deadlock on devices with {_queues(hanging)}: {found[hanging[0]]}")


def deadlock(
    operations: Mapping[int, Sequence[Operation]], groups: Groups | None = None, *, queues: int | None = None
) -> str | None:
    """Describe where ranks deadlock with this number of hardware queues, or return None.

    Args:
        operations, groups: see `check_order`; they satisfy its rules, except that they may deadlock.
        queues: hardware queues per device; None: one per stream.
    """
    return _QueueRun(_batches(operations), groups or {}, queues).to_the_end()


def _batches(operations: Mapping[int, Sequence[Operation]]) -> dict[int, list[Batch]]:
    return {
        rank: [tuple(batch) for _, batch in groupby(issued, key=lambda operation: operation.batch)]
        for rank, issued in sorted(operations.items())
    }


def _queues(numbers: Sequence[int]) -> str:
    counted = " or ".join(map(str, numbers))
    return f"{counted} hardware queue{'' if numbers == [1] else 's'}"


def _check_batch(rank: int, number: int, batch: Batch) -> None:
    if any(operation.is_collective for operation in batch) and len(batch) > 1:
        raise RunError(f"rank {rank}, batch {number}: a collective shares a batch with other operations: {batch[0]}")
    counts = Counter((operation.group, operation.verb, operation.peer) for operation in batch)
    for operation in batch:
        if counts[operation.group, operation.verb, operation.peer] > 1:
            raise RunError(f"rank {rank}, batch {number}: more than one {operation} in one batch")
        if operation.peer == rank:
            raise RunError(f"rank {rank}, batch {number}: {operation} is to itself")


def _check_collectives(operations: Mapping[int, Sequence[Operation]], groups: Groups) -> None:
    names = {operation.group for issued in operations.values() for operation in issued if operation.is_collective}
    for name in sorted(names):
        ranks = sorted(groups.get(name, operations))
        reference = _collectives(operations.get(ranks[0], ()), name)
        for rank in ranks[1:]:
            _compare_sequences(name, ranks[0], reference, rank, _collectives(operations.get(rank, ()), name))


def _collectives(issued: Sequence[Operation], group: str) -> list[Operation]:
    return [operation for operation in issued if operation.is_collective and operation.group == group]


def _compare_sequences(
    group: str, first: int, reference: list[Operation], rank: int, sequence: list[Operation]
) -> None:
    for position, (expected, found) in enumerate(zip(reference, sequence, strict=False)):
        if replace(expected, batch=0, waited=None) != replace(found, batch=0, waited=None):
            raise RunError(f"rank {rank}: collective {position} is {found}, but rank {first} issues {expected}")
    if len(reference) != len(sequence):
        raise RunError(
            f"rank {rank} issues {len(sequence)} collectives on {group}, but rank {first} issues {len(reference)}"
        )


def _check_pairs(operations: Mapping[int, Sequence[Operation]]) -> None:
    """Check that the n-th send from a to b in a group matches b's n-th receive from a, with equal sizes."""
    sends: dict[tuple[str, int, int], list[Operation]] = {}
    receives: dict[tuple[str, int, int], list[Operation]] = {}
    for rank, issued in operations.items():
        for operation in issued:
            if operation.verb == SEND:
                sends.setdefault((operation.group, rank, operation.peer), []).append(operation)
            elif operation.verb == RECEIVE:
                receives.setdefault((operation.group, operation.peer, rank), []).append(operation)
    for pair in sorted(sends.keys() | receives.keys()):
        _check_pair(pair, sends.get(pair, []), receives.get(pair, []))


def _check_pair(pair: tuple[str, int, int], sends: list[Operation], receives: list[Operation]) -> None:
    _, sender, receiver = pair
    for position, (send, receive) in enumerate(zip(sends, receives, strict=False)):
        if (send.num_bytes, send.content) != (receive.num_bytes, receive.content):
            raise RunError(
                f"rank {sender}: {send}, its number {position} there, meets on rank {receiver} "
                f"another message: {receive}"
            )
    if len(sends) > len(receives):
        raise RunError(f"rank {sender}: {sends[len(receives)]} is never received")
    if len(receives) > len(sends):
        raise RunError(f"rank {receiver}: {receives[len(sends)]} is never sent")


@dataclass(slots=True)
class _Launch:
    """A kernel in a queue: a batch of operations, or the computation before batch `number` if `batch` is None."""

    number: int
    batch: Batch | None = None
    waits_for: frozenset[int] = frozenset()
    matched: set[int] = field(default_factory=set)


class _RankQueues:
    """Queues of a rank. A batch may start once the preceding computation, which produces its data, has ended."""

    def __init__(self, issued: Sequence[Batch], queues: int | None) -> None:
        self.issued = issued
        self.done: set[int] = set()
        self.computed = -1
        streams: dict[str, int] = {}
        for batch in issued:
            streams.setdefault(batch[0].group, len(streams) + 1)  # stream 0 is the computation's
        self.queue_of = {group: number % (queues or len(streams) + 1) for group, number in streams.items()}
        self.queues: list[deque[_Launch]] = [deque() for _ in range(queues or len(streams) + 1)]
        waited = _waited_before(issued)
        for number, batch in enumerate(issued):
            self.queues[0].append(_Launch(number, waits_for=waited.get(number, frozenset())))
            self.queues[self.queue_of[batch[0].group]].append(_Launch(number, batch))

    def ready(self, group: str) -> _Launch | None:
        """Return the batch at the head of the group's queue if its data is ready, else None."""
        queue = self.queues[self.queue_of[group]] if group in self.queue_of else None
        head = queue[0] if queue else None
        if head is None or head.batch is None or head.batch[0].group != group or head.number > self.computed:
            return None
        return head

    def finish(self, launch: _Launch) -> None:
        assert launch.batch is not None
        self.queues[self.queue_of[launch.batch[0].group]].popleft()
        self.done.add(launch.number)

    def compute(self) -> bool:
        """Run the computation at the head of its queue if its dependencies are met; return whether it did."""
        head = self.queues[0][0] if self.queues[0] else None
        if head is None or head.batch is not None or not head.waits_for <= self.done:
            return False
        self.computed = head.number
        self.queues[0].popleft()
        return True


def _waited_before(issued: Sequence[Batch]) -> dict[int, frozenset[int]]:
    """Map each batch to the batches that its rank waited for before issuing it."""
    found: dict[int, set[int]] = {}
    numbers = {batch[0].batch: number for number, batch in enumerate(issued)}
    for number, batch in enumerate(issued):
        for operation in batch:
            if operation.waited is None:
                found.setdefault(number + 1, set()).add(number)
            elif operation.waited in numbers:
                found.setdefault(numbers[operation.waited], set()).add(number)
    return {number: frozenset(waited) for number, waited in found.items()}


class _QueueRun:
    """Simulates all ranks on devices with `queues` hardware queues; None: one per stream.

    A batch leaves its queue when each of its operations has met its peer: sends and receives in a batch do not block
    each other, as in ncclGroup and HcclBatchSendRecv. A collective leaves the queues of all its ranks at once.
    """

    def __init__(self, batches: Mapping[int, list[Batch]], groups: Groups, queues: int | None) -> None:
        names = {batch[0].group for issued in batches.values() for batch in issued}
        self._sorted = {name: sorted(groups.get(name, batches)) for name in names}
        self._devices = {rank: _RankQueues(issued, queues) for rank, issued in batches.items()}
        self._todo = deque(self._devices)
        self._arrived: Counter[str] = Counter()  # per group: number of its ranks, in order, that reached the collective

    def to_the_end(self) -> str | None:
        """Run all ranks as far as possible; describe an operation that is stuck, or return None."""
        while self._todo:
            rank = self._todo.popleft()
            while self._advance(rank):
                pass
        return next((self._reason(rank) for rank, device in self._devices.items() if any(device.queues)), None)

    def _advance(self, rank: int) -> bool:
        """Advance each queue of a rank by one launch if possible; return whether any advanced."""
        device = self._devices[rank]
        moved = device.compute()
        for group in device.queue_of:
            launch = device.ready(group)
            if launch is None or launch.batch is None:
                continue
            if launch.batch[0].is_collective:
                moved |= self._meet(launch.batch[0])
            else:
                moved |= self._exchange(rank, launch, launch.batch)
        return moved

    def _meet(self, collective: Operation) -> bool:
        """Run a collective if all its ranks have reached it; return whether it ran."""
        group, members = collective.group, self._members(collective)
        while self._arrived[group] < len(members):
            device = self._devices.get(members[self._arrived[group]])
            if device is None or not _is_collective(device.ready(group)):
                return False
            self._arrived[group] += 1
        self._arrived[group] = 0
        for rank in members:
            launch = self._devices[rank].ready(group)
            assert launch is not None
            self._devices[rank].finish(launch)
            self._todo.append(rank)
        return True

    def _exchange(self, rank: int, launch: _Launch, batch: Batch) -> bool:
        for position, operation in enumerate(batch):
            if position not in launch.matched:
                self._match(rank, launch, position, operation)
        if len(launch.matched) < len(batch):
            return False
        self._devices[rank].finish(launch)
        return True

    def _match(self, rank: int, launch: _Launch, position: int, operation: Operation) -> None:
        peer = self._devices.get(operation.peer)
        other = peer.ready(operation.group) if peer is not None else None
        if other is None or other.batch is None:
            return
        wanted = RECEIVE if operation.verb == SEND else SEND
        for i, candidate in enumerate(other.batch):
            if candidate.verb == wanted and candidate.peer == rank and i not in other.matched:
                launch.matched.add(position)
                other.matched.add(i)
                self._todo.append(operation.peer)
                return

    def _members(self, collective: Operation) -> list[int]:
        return self._sorted[collective.group]

    def _reason(self, rank: int) -> str:
        number, operation = self._stuck(rank)
        others = self._missing(rank, operation)
        reason = f"rank {rank} waits forever in batch {number}: {operation}"
        for other in others[:1]:
            held, its = self._stuck(other)
            reason += f"; rank {other} is in batch {held}: {its}"
        return reason

    def _stuck(self, rank: int) -> tuple[int, Operation]:
        """Return a rank's earliest unfinished operation."""
        device = self._devices[rank]
        number = next(i for i in range(len(device.issued)) if i not in device.done)
        launches = [launch for queue in device.queues for launch in queue if launch.batch and launch.number == number]
        return number, next(op for i, op in enumerate(device.issued[number]) if i not in launches[0].matched)

    def _missing(self, rank: int, operation: Operation) -> list[int]:
        """Return the running ranks that have not reached an operation."""
        if not operation.is_collective:
            return [other for other in (operation.peer,) if self._is_running(other)]
        return [
            other
            for other in self._members(operation)
            if other != rank
            and self._is_running(other)
            and not _is_collective(self._devices[other].ready(operation.group))
        ]

    def _is_running(self, rank: int) -> bool:
        return rank in self._devices and any(self._devices[rank].queues)


def _is_collective(launch: _Launch | None) -> bool:
    return launch is not None and launch.batch is not None and launch.batch[0].is_collective
