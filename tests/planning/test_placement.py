from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.planning.drafts import place_groups


def placed(degrees: list[int], num_ranks: int, ranks_per_node: int) -> list[list[int]]:
    offsets, ranks = place_groups(degrees, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    return [ranks[offsets[i] : offsets[i + 1]].tolist() for i in range(len(degrees))]


def test_powers_of_two_lie_aligned_in_nodes() -> None:
    assert placed([1, 4, 2, 8, 1], num_ranks=16, ranks_per_node=8) == [
        [14],
        [8, 9, 10, 11],
        [12, 13],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [15],
    ]


def test_a_group_larger_than_a_node_takes_whole_nodes_first() -> None:
    assert placed([3, 10], num_ranks=16, ranks_per_node=8) == [[10, 11, 12], list(range(10))]


def test_groups_that_no_node_can_hold_take_what_is_left() -> None:
    assert placed([3, 3, 2], num_ranks=8, ranks_per_node=4) == [[0, 1, 2], [4, 5, 6], [3, 7]]


def test_a_smaller_last_node_is_used() -> None:
    assert placed([2, 4, 4], num_ranks=10, ranks_per_node=4) == [[8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("ranks_per_node", [1, 3, 8, 100])
@settings(max_examples=60)
@given(data=st.data())
def test_groups_are_disjoint_ascending_and_cross_nodes_only_when_they_must(
    ranks_per_node: int, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 40))
    degrees: list[int] = []
    while sum(degrees) < num_ranks and data.draw(st.booleans() if degrees else st.just(True)):
        degrees.append(data.draw(st.integers(1, num_ranks - sum(degrees))))
    groups = placed(degrees, num_ranks, ranks_per_node)
    assert [len(group) for group in groups] == degrees
    assert all(group == sorted(set(group)) for group in groups)
    taken = [rank for group in groups for rank in group]
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(range(num_ranks))
    free = set(range(num_ranks)) - set(taken)
    for group in groups:
        if len(group) <= ranks_per_node and len({rank // ranks_per_node for rank in group}) > 1:
            nodes = {rank // ranks_per_node for rank in free}
            assert all(sum(rank // ranks_per_node == node for rank in free) < len(group) for node in nodes)
