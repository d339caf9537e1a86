"""Sums over the members of a group, by the connections that its attention has."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lockstep import run_lockstep
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring
from fcp_cli.verification.order import Operation, check_order
from tests.runtime.emulation import recorded_members, run_recorded
from tests.runtime.reference import make_example

pytestmark = pytest.mark.torch

RANKS = (3, 5, 6, 9, 10, 14)


def pairs(operations: dict[int, list[Operation]]) -> set[frozenset[int]]:
    return {frozenset((rank, one.peer)) for rank, issued in operations.items() for one in issued}


@pytest.mark.parametrize("shared", [1, 2, 3, 6])
def test_every_member_gets_the_same_sum_from_members_that_it_meets_in_attention(shared: int) -> None:
    members, recorders = recorded_members(shard_layout((30, 5), len(RANKS), shared), RANKS)
    own = [torch.randn(2, 4, dtype=torch.float64) for _ in RANKS]
    found = run_lockstep([member.summed(part) for member, part in zip(members, own, strict=True)])
    for total in found:
        torch.testing.assert_close(total, torch.stack(own).sum(0), rtol=0, atol=1e-14)
    operations = {rank: recorder.operations for rank, recorder in recorders.items()}
    check_order(operations)
    _, attention = run_recorded(make_example((30, 5), (6, 6), 4), RANKS, heads_degree=shared)
    assert pairs(operations) <= pairs(attention)


def test_a_member_alone_sends_nothing() -> None:
    own = torch.ones(3)
    (found,) = run_lockstep([Ring(shard_layout((4,), 1)).summed(own)])
    assert found is own
