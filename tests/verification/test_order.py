"""The order checker passes what the ring does and catches every way it could go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.errors import RunError
from fcp_cli.verification.order import HARDWARE_QUEUES, NEVER, Operation, check_order, deadlock
from tests.messages import raises
from tests.runtime.emulation import run_recorded
from tests.runtime.reference import make_example

pytestmark = pytest.mark.torch


def send(peer: int, batch: int, size: int = 8) -> Operation:
    return Operation(group="ring", verb="send", batch=batch, peer=peer, num_bytes=size, shape=(size,), content="kv")


def receive(peer: int, batch: int, size: int = 8) -> Operation:
    return Operation(group="ring", verb="recv", batch=batch, peer=peer, num_bytes=size, shape=(size,), content="kv")


def collective(name: str, batch: int, group: str = "world") -> Operation:
    return Operation(group=group, verb=name, batch=batch, num_bytes=4, shape=(1,), content="collective")


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple),
    degree=st.integers(2, 6),
)
@settings(max_examples=30)
def test_what_a_ring_does_is_in_order(lengths: tuple[int, ...], degree: int) -> None:
    _, operations = run_recorded(make_example(lengths, (2, 1), head_dim=8), tuple(range(degree)))
    check_order(operations)


def microbatches(*groups: tuple[int, ...]) -> dict[int, list[Operation]]:
    """What ranks record that run one pack on each group, one group after the other, and then sum their gradients."""
    log: dict[int, list[Operation]] = {rank: [] for group in groups for rank in group}
    for seed, group in enumerate(groups):
        _, operations = run_recorded(make_example((7, 12), (2, 1), head_dim=8, seed=seed), group, torch.float32)
        for rank, issued in operations.items():
            append(log[rank], issued)
    for issued in log.values():
        append(issued, [collective("all_reduce", 0)])
    return log


def append(log: list[Operation], issued: list[Operation]) -> None:
    base = log[-1].batch + 1 if log else 0
    log.extend(replace(operation, batch=operation.batch + base) for operation in issued)


def test_groups_that_change_with_every_microbatch_are_in_order() -> None:
    check_order(microbatches((0, 3), (1, 2), (0, 1, 2), (3,), (0, 1, 2, 3), (0, 2), (1, 3)))


def pairs_in_turn(order: dict[int, list[tuple[int, int]]]) -> dict[int, list[Operation]]:
    """What ranks record that run equal packs on pairs of ranks, each rank in its own order."""
    example = make_example((7, 12), (2, 1), head_dim=8)
    recorded = {pair: run_recorded(example, pair)[1] for pairs in order.values() for pair in pairs}
    log: dict[int, list[Operation]] = {rank: [] for rank in order}
    for rank, pairs in order.items():
        for pair in pairs:
            append(log[rank], recorded[pair][rank])
    return log


def test_ranks_that_follow_one_order_of_microbatches_all_finish() -> None:
    check_order(pairs_in_turn({0: [(0, 1), (0, 2)], 1: [(0, 1), (1, 2)], 2: [(1, 2), (0, 2)]}))


def test_ranks_that_run_microbatches_in_different_orders_deadlock() -> None:
    """Every message has its partner of equal size, first in first out, and gloo would let it pass."""
    log = pairs_in_turn({0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]})
    with raises(
        snapshot(
            "RunError: deadlock: rank 0 waits forever in batch 0: send to rank 1 on ring (1152 bytes kv); rank 1 is in batch 0: send to rank 2 on ring (1152 bytes kv)"
        )
    ):
        check_order(log)


# What ranks record -> what is wrong with it.
REFUSED: dict[str, dict[int, list[Operation]]] = {
    "a cycle of waits": {
        0: [send(1, 0), receive(2, 1)],
        1: [send(2, 0), receive(0, 1)],
        2: [send(0, 0), receive(1, 1)],
    },
    "a collective between two halves of an exchange": {
        0: [send(1, 0), collective("all_reduce", 1)],
        1: [collective("all_reduce", 0), receive(0, 1)],
    },
    "a send without its receive": {0: [send(1, 0)], 1: []},
    "a receive without its send": {0: [], 1: [receive(0, 0)]},
    "unequal bytes": {0: [send(1, 0, size=16)], 1: [receive(0, 0)]},
    "a message that meets the wrong one of equal size": {0: [replace(send(1, 0), content="dkv")], 1: [receive(0, 0)]},
    "two sends to one peer in a batch": {0: [send(1, 0), send(1, 0)], 1: [receive(0, 0), receive(0, 1)]},
    "a message to oneself": {0: [send(0, 0), receive(0, 0)]},
    "collectives in another order": {
        0: [collective("all_reduce", 0), collective("all_gather", 1)],
        1: [collective("all_gather", 0), collective("all_reduce", 1)],
    },
    "a missing collective": {0: [collective("all_reduce", 0)], 1: []},
}
REFUSALS = snapshot(
    {
        "a cycle of waits": "RunError: deadlock: rank 0 waits forever in batch 0: send to rank 1 on ring (8 bytes kv); rank 1 is in batch 0: send to rank 2 on ring (8 bytes kv)",
        "a collective between two halves of an exchange": "RunError: deadlock: rank 0 waits forever in batch 0: send to rank 1 on ring (8 bytes kv); rank 1 is in batch 0: all_reduce on world (4 bytes)",
        "a send without its receive": "RunError: rank 0: send to rank 1 on ring (8 bytes kv) is never received",
        "a receive without its send": "RunError: rank 1: recv from rank 0 on ring (8 bytes kv) is never sent",
        "unequal bytes": "RunError: rank 0: send to rank 1 on ring (16 bytes kv), its number 0 there, meets on rank 1 another message: recv from rank 0 on ring (8 bytes kv)",
        "a message that meets the wrong one of equal size": "RunError: rank 0: send to rank 1 on ring (8 bytes dkv), its number 0 there, meets on rank 1 another message: recv from rank 0 on ring (8 bytes kv)",
        "two sends to one peer in a batch": "RunError: rank 0, batch 0: more than one send to rank 1 on ring (8 bytes kv) in one batch",
        "a message to oneself": "RunError: rank 0, batch 0: send to rank 0 on ring (8 bytes kv) is to itself",
        "collectives in another order": "RunError: rank 1: collective 0 is all_gather on world (4 bytes), but rank 0 issues all_reduce on world (4 bytes)",
        "a missing collective": "RunError: rank 1 issues 0 collectives on world, but rank 0 issues 1",
    }
)


@pytest.mark.parametrize("case", REFUSED)
def test_an_order_that_hangs_or_mixes_messages_up_is_refused_and_names_the_operation(case: str) -> None:
    with raises(REFUSALS[case]):
        check_order(REFUSED[case])


def test_the_same_cycle_in_one_batch_per_rank_passes() -> None:
    check_order({r: [send((r + 1) % 3, 0), receive((r - 1) % 3, 0)] for r in range(3)})


def test_a_group_of_some_ranks_concerns_only_those() -> None:
    log = {0: [collective("all_reduce", 0, "pair")], 1: [collective("all_reduce", 0, "pair")], 2: []}
    check_order(log, {"pair": (0, 1)})
    with pytest.raises(RunError, match="rank 2 issues 0 collectives on pair"):
        check_order(log)


def reducing_inside_backward() -> dict[int, list[Operation]]:
    """What two ranks record of a step under DDP: a ring of both, which is rank 0's last micro-batch and not rank 1's.

    Rank 0's reducer issues a bucket between two hops and waits for it when its backward ends.
    """
    peers = {0: 1, 1: 0}

    def hop(rank: int, batch: int) -> list[Operation]:
        return [send(peers[rank], batch), receive(peers[rank], batch)]

    bucket = replace(collective("all_reduce", 0), waited=NEVER)
    last = [*hop(0, 0), replace(bucket, batch=1), *hop(0, 2), replace(bucket, batch=3)]
    not_last = [*hop(1, 0), *hop(1, 1), replace(bucket, batch=2), replace(bucket, batch=3)]
    return {0: last, 1: not_last}


def test_a_reduction_between_two_hops_of_a_ring_hangs_where_streams_share_a_queue() -> None:
    log = reducing_inside_backward()
    # With two, the reducer's stream comes to share the queue of the computation, which the next hop comes after.
    hanging = [queues for queues in (1, 2, 3, 8, 32, None) if deadlock(log, queues=queues)]
    assert hanging == [1, 2]
    with raises(
        snapshot(
            "RunError: deadlock on devices with 1 or 2 hardware queues: rank 0 waits forever in batch 1: all_reduce on world (4 bytes); rank 1 is in batch 1: send to rank 0 on ring (8 bytes kv)"
        )
    ):
        check_order(log)


def test_a_reduction_after_all_hops_ends_on_every_device() -> None:
    late = {
        rank: sorted(issued, key=lambda op: op.is_collective) for rank, issued in reducing_inside_backward().items()
    }
    check_order({rank: [replace(op, batch=at) for at, op in renumbered(issued)] for rank, issued in late.items()})


def renumbered(issued: list[Operation]) -> list[tuple[int, Operation]]:
    """Batches numbered in their new order."""
    numbers = {batch: at for at, batch in enumerate(dict.fromkeys((op.is_collective, op.batch) for op in issued))}
    return [(numbers[op.is_collective, op.batch], op) for op in issued]


def test_what_a_rank_waits_for_holds_up_what_it_issues_next_on_any_device() -> None:
    """A gather that a forward waits for, before a ring on one rank and after it on the other."""
    gather = collective("all_gather", 0)
    log = {
        0: [gather, send(1, 1), receive(1, 1)],
        1: [send(0, 0), receive(0, 0), replace(gather, batch=1)],
    }
    assert all(deadlock(log, queues=queues) for queues in (*HARDWARE_QUEUES, None))
    asynchronous = {rank: [replace(op, waited=NEVER) for op in issued] for rank, issued in log.items()}
    assert deadlock(asynchronous, queues=None) is None


@given(st.data(), st.integers(2, 5))
@settings(max_examples=60)
def test_what_ends_with_one_queue_ends_with_more_and_a_common_order_always_ends(
    data: st.DataObject, num_ranks: int
) -> None:
    ranks = list(range(num_ranks))
    members = st.lists(st.sampled_from(ranks), min_size=2, max_size=num_ranks, unique=True).map(sorted).map(tuple)
    meetings = data.draw(st.lists(st.tuples(members, st.booleans()), min_size=1, max_size=8))
    log: dict[int, list[Operation]] = {rank: [] for rank in ranks}
    groups = {}
    for number, (group, is_waited) in enumerate(meetings):
        name = f"{group}"
        groups[name] = group
        for rank in group:
            found = collective("all_reduce", number, name)
            log[rank].append(found if is_waited else replace(found, waited=NEVER))
    check_order(log, groups)
    shuffled = {rank: data.draw(st.permutations(issued)) for rank, issued in log.items()}
    mixed = {r: [replace(op, batch=at) for at, op in enumerate(issued)] for r, issued in shuffled.items()}
    if deadlock(mixed, groups, queues=1) is None:
        assert all(deadlock(mixed, groups, queues=queues) is None for queues in (2, 3, 8, 32, None))
