from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.rings import BYTES_PER_PEER, ring_hops, ring_order, ring_pairs
from tests.plan.counted_peers import count_peers, plan_peers
from tests.runtime.plans import Row, random_steps, write_plan

Pair = tuple[int, int]


def neighbours(order: tuple[int, ...]) -> set[Pair]:
    """The pairs of a ring, read off its order one by one."""
    pairs = set()
    for place, rank in enumerate(order):
        other = order[(place + 1) % len(order)]
        if other != rank:
            pairs.add((min(rank, other), max(rank, other)))
    return pairs


def most_peers(groups: list[tuple[int, ...]], per_node: int) -> int:
    pairs = {pair for group in groups for pair in neighbours(ring_order(group, per_node))}
    return max(sum(rank in pair for pair in pairs) for rank in {rank for pair in pairs for rank in pair})


@settings(max_examples=300)
@given(st.sets(st.integers(0, 79), min_size=1), st.sampled_from([1, 2, 3, 4, 5, 8, 16, 80]))
def test_a_ring_order_is_an_order_of_the_groups_own_ranks(ranks: set[int], per_node: int) -> None:
    group = tuple(sorted(ranks))
    order = ring_order(group, per_node)
    assert sorted(order) == list(group)
    assert set(ring_pairs(group, per_node)) == neighbours(order)


@settings(max_examples=100)
@given(st.sets(st.integers(0, 79), min_size=1), st.sampled_from([2, 4, 8]), st.sampled_from([2, 3, 4, 8]))
def test_sets_share_heads_and_ranks_of_one_place_are_a_ring(ranks: set[int], per_node: int, shared: int) -> None:
    group = tuple(sorted(ranks))[: len(ranks) // shared * shared]
    order = ring_order(group, per_node, shared)
    sets = [order[i : i + shared] for i in range(0, len(order), shared)]
    assert sorted(order) == list(group)
    assert sorted(sets) == [group[i : i + shared] for i in range(0, len(group), shared)]
    pairs = {pair for place in range(shared) for pair in neighbours(order[place::shared])}
    pairs |= {(one, other) for members in sets for one in members for other in members if one < other}
    assert set(ring_pairs(group, per_node, shared)) == pairs
    assert {(b, a) for members in sets for a in members for b in members if a != b} <= set(
        ring_hops(group, per_node, shared)
    )


def test_sets_of_whole_nodes_cross_on_rails() -> None:
    for nodes in range(2, 12):
        for a, b in ring_hops(tuple(range(nodes * 8)), 8, 8):
            assert a // 8 == b // 8 or a % 8 == b % 8


def test_rings_of_contiguous_ranks_inside_a_node_need_four_peers_whatever_their_degree() -> None:
    groups = [tuple(range(first, stop)) for first in range(64) for stop in range(first + 2, 65)]
    assert most_peers(groups, per_node=64) == 4


@pytest.mark.parametrize("per_node", [4, 5, 8, 16])
def test_rings_over_whole_nodes_visit_each_node_once_and_cross_on_rails(per_node: int) -> None:
    for nodes in range(2, 12):
        order = ring_order(tuple(range(nodes * per_node)), per_node)
        crossings = [
            (a, b) for a, b in zip(order, (*order[1:], order[0]), strict=True) if a // per_node != b // per_node
        ]
        assert len(crossings) == nodes
        assert all(a % per_node == b % per_node for a, b in crossings)


@pytest.mark.parametrize(("per_node", "most"), [(1, 4), (2, 3), (4, 5), (8, 4), (16, 4)])
def test_rings_of_contiguous_whole_nodes_and_of_ranks_inside_them_need_few_peers(per_node: int, most: int) -> None:
    nodes = range(10)
    inside = [
        tuple(range(node * per_node + first, node * per_node + stop))
        for node in nodes
        for first in range(per_node)
        for stop in range(first + 2, per_node + 1)
    ]
    wide = [tuple(range(a * per_node, b * per_node)) for a in nodes for b in range(a + 2, 11)]
    assert most_peers(inside + wide, per_node) == most


def test_ranks_beside_whole_nodes_are_visited_on_their_rails() -> None:
    assert ring_order(tuple(range(12)), 8) == (0, 2, 4, 6, 7, 5, 3, 1, 9, 11, 10, 8)


def test_peers_are_counted_as_the_steps_are_read_and_show_how_they_grow(tmp_path: Path) -> None:
    steps = [
        [Row([0, 1], [9]), Row([2, 3], [9])],
        [Row([0, 1], [9]), Row([2], [3]), Row([3], [3])],
        [Row([0, 1, 2, 3], [40])],
    ]
    peers = plan_peers(write_plan(tmp_path / "plan.parquet", steps, num_ranks=4))
    # 0-1 and 2-3, then the ring 0 2 3 1.
    assert peers.pairs == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert peers.new_pairs == [2, 0, 2]
    assert peers.means() == [1.0, 1.0, 2.0]
    assert (peers.mean, peers.most, peers.most_bytes) == (2.0, 2, 2 * BYTES_PER_PEER)
    assert peers.to_json() == {
        "peers_mean": 2.0,
        "peers_most": 2,
        "peers_most_bytes": 2 * BYTES_PER_PEER,
        "peers_mean_after_steps": {"1": 1.0, "2": 1.0, "3": 2.0},
    }


def test_a_plan_without_rings_has_no_peers(tmp_path: Path) -> None:
    peers = plan_peers(write_plan(tmp_path / "plan.parquet", [[Row([0], [9]), Row([1], [9])]], num_ranks=2))
    assert (peers.pairs, peers.mean, peers.most) == ([], 0.0, 0)


@settings(max_examples=20)
@given(st.integers(2, 24), st.integers(0, 10**6))
def test_peers_are_those_of_all_rings_of_all_steps(
    tmp_path_factory: pytest.TempPathFactory, num_ranks: int, seed: int
) -> None:
    plan = tmp_path_factory.mktemp("plan") / "plan.parquet"
    write_plan(plan, random_steps(num_ranks, 4, sync="iteration", seed=seed), num_ranks=num_ranks)
    reader = PlanReader(plan)
    per_node = reader.metadata.ranks_per_node
    wanted = {
        pair
        for step in reader.steps()
        for row in step.microbatches()
        for pair in neighbours(ring_order(row.ranks, per_node))
    }
    count = count_peers(reader.steps(), num_ranks=num_ranks, ranks_per_node=per_node)
    assert count.pairs == sorted(wanted)
    assert count.per_rank.tolist() == [sum(rank in pair for pair in wanted) for rank in range(num_ranks)]
