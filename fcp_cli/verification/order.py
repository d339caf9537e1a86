"""Check that the operations which the ranks of a run issued cannot deadlock, without running any rank.

A green run over gloo does not show that the same order works on NCCL or HCCL: gloo buffers, they block. This checks
the recorded operations against what those libraries require: every send meets its receive, first in first out and of
equal size; a batch has at most one send and one receive per peer; every rank issues a group's collectives in the same
order; and when each batch and each collective blocks until all its peers arrive, every rank gets to its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fcp_cli.errors import RunError

SEND, RECEIVE = "send", "recv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation that a rank issued.

    Attributes:
        group: communicator it ran on.
        verb: "send", "recv", or the name of a collective.
        batch: number of the batch it was issued in, counted per rank.
        peer: global rank at the other end; -1 for a collective.
        num_bytes: size of what it carries.
        shape: shape of what it carries.
        content: what it carries ("kv", "dkv", ...); for messages only.
    """

    group: str
    verb: str
    batch: int
    peer: int = -1
    num_bytes: int = 0
    shape: tuple[int, ...] = ()
    content: str = ""

    @property
    def is_collective(self) -> bool:
        return self.verb not in (SEND, RECEIVE)

    def __str__(self) -> str:
        if self.is_collective:
            return f"{self.verb} on {self.group} ({self.num_bytes} bytes)"
        direction = "to" if self.verb == SEND else "from"
        return f"{self.verb} {direction} rank {self.peer} on {self.group} ({self.num_bytes} bytes {self.content})"


Batch = tuple[Operation, ...]


def check_order(
    operations: Mapping[int, Sequence[Operation]], groups: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Check what every rank recorded.

    Args:
        operations: global rank -> its operations, in the order it issued them.
        groups: group -> its ranks, for the collectives; all ranks where it is not named.

    Raises:
        RunError: names the first rank and operation at fault.
    """
    batches = {
        rank: [tuple(batch) for _, batch in groupby(issued, key=lambda operation: operation.batch)]
        for rank, issued in sorted(operations.items())
    }
    for rank, issued in batches.items():
        for number, batch in enumerate(issued):
            _check_batch(rank, number, batch)
    _check_collectives(operations, groups or {})
    _check_pairs(operations)
    _simulate(batches, groups or {})


def _check_batch(rank: int, number: int, batch: Batch) -> None:
    if any(operation.is_collective for operation in batch) and len(batch) > 1:
        raise RunError(f"rank {rank}, batch {number}: a collective shares a batch with other operations: {batch[0]}")
    counts = Counter((operation.group, operation.verb, operation.peer) for operation in batch)
    for operation in batch:
        if counts[operation.group, operation.verb, operation.peer] > 1:
            raise RunError(f"rank {rank}, batch {number}: more than one {operation} in one batch")
        if operation.peer == rank:
            raise RunError(f"rank {rank}, batch {number}: {operation} is to itself")


def _check_collectives(operations: Mapping[int, Sequence[Operation]], groups: Mapping[str, Sequence[int]]) -> None:
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
        if replace(expected, batch=0) != replace(found, batch=0):
            raise RunError(f"rank {rank}: collective {position} is {found}, but rank {first} issues {expected}")
    if len(reference) != len(sequence):
        raise RunError(
            f"rank {rank} issues {len(sequence)} collectives on {group}, but rank {first} issues {len(reference)}"
        )


def _check_pairs(operations: Mapping[int, Sequence[Operation]]) -> None:
    """Check that the n-th send from a to b on a group meets the n-th receive of b from a, and carries as many bytes."""
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


def _simulate(batches: Mapping[int, list[Batch]], groups: Mapping[str, Sequence[int]]) -> None:
    """Run the batches as NCCL and HCCL would, and raise RunError when no rank can move.

    Every batch blocks its rank until each of its operations has met its partner at the head of the partner's list.
    Receives and sends inside a batch do not block each other, as in one ncclGroup or one HcclBatchSendRecv.
    """
    heads = dict.fromkeys(batches, 0)
    matched: dict[int, set[int]] = {rank: set() for rank in batches}
    before = None
    while (state := (sum(heads.values()), sum(map(len, matched.values())))) != before:
        before = state
        for rank, issued in batches.items():
            while heads[rank] < len(issued) and _advance(rank, batches, heads, matched, groups):
                pass
    for rank, issued in batches.items():
        if heads[rank] < len(issued):
            stuck = next(op for i, op in enumerate(issued[heads[rank]]) if i not in matched[rank])
            raise RunError(f"deadlock: rank {rank} waits forever in batch {heads[rank]}: {stuck}")


def _advance(
    rank: int,
    batches: Mapping[int, list[Batch]],
    heads: dict[int, int],
    matched: dict[int, set[int]],
    groups: Mapping[str, Sequence[int]],
) -> bool:
    """Match what can be matched of the rank's current batch; return whether the rank completed it and moved on."""
    batch = batches[rank][heads[rank]]
    if batch[0].is_collective:
        members = sorted(groups.get(batch[0].group, batches))
        if not all(_is_at(member, batch[0], batches, heads) for member in members):
            return False
        for member in members:
            heads[member] += 1
        return True
    for position, operation in enumerate(batch):
        if position not in matched[rank]:
            _match(rank, position, operation, batches, heads, matched)
    if len(matched[rank]) < len(batch):
        return False
    heads[rank] += 1
    matched[rank] = set()
    return True


def _is_at(rank: int, collective: Operation, batches: Mapping[int, list[Batch]], heads: Mapping[int, int]) -> bool:
    issued = batches.get(rank, [])
    if heads.get(rank, 0) >= len(issued):
        return False
    head = issued[heads[rank]][0]
    return head.is_collective and head.group == collective.group


def _match(
    rank: int,
    position: int,
    operation: Operation,
    batches: Mapping[int, list[Batch]],
    heads: Mapping[int, int],
    matched: dict[int, set[int]],
) -> None:
    peer = operation.peer
    if peer not in batches or heads[peer] >= len(batches[peer]):
        return
    wanted = RECEIVE if operation.verb == SEND else SEND
    for i, other in enumerate(batches[peer][heads[peer]]):
        meets = other.verb == wanted and other.peer == rank and other.group == operation.group
        if meets and i not in matched[peer]:
            matched[rank].add(position)
            matched[peer].add(i)
            return
