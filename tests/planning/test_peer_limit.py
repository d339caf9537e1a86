"""A limit on peers holds over a whole plan, on machines of any shape, and costs little."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fcp_cli.errors import UsageError
from fcp_cli.memory.fitting import RING_PEERS
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.fcp_solver import make_solver
from fcp_cli.planning.groups import most_peers, needs_whole_nodes
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs
from tests.messages import raises
from tests.plan.counted_peers import count_peers, plan_peers
from tests.planning.examples import four_steps


def planned(batches: GlobalBatches, max_peers: int | None) -> list[StepPlan]:
    """All steps; `assemble` proves the rules of a plan on each."""
    solver = make_solver(batches, max_peers=max_peers)
    assert solver.options == ({} if max_peers is None else {"max_peers": max_peers})
    return [assemble(solver.assign(batch), batch, batches.problem) for batch in batches]


@pytest.mark.boundscheck
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@settings(max_examples=40)
@given(
    max_peers=st.integers(1, 12), num_ranks=st.integers(2, 40), ranks_per_node=st.integers(1, 9), seed=st.integers(0, 9)
)
def test_no_rank_has_more_peers_than_allowed(
    sync: Sync, max_peers: int, num_ranks: int, ranks_per_node: int, seed: int
) -> None:
    batches = four_steps(sync, num_ranks=num_ranks, ranks_per_node=ranks_per_node, seed=seed)
    try:
        steps = planned(batches, max_peers)
    except UsageError as error:
        assert "--max-peers" in str(error)
        assume(False)
    assert count_peers(steps, num_ranks=num_ranks, ranks_per_node=ranks_per_node).most <= max_peers


@settings(max_examples=40)
@given(num_ranks=st.integers(2, 60), ranks_per_node=st.integers(1, 17))
def test_eight_peers_are_enough_on_every_machine(num_ranks: int, ranks_per_node: int) -> None:
    assert most_peers(False, num_ranks=num_ranks, ranks_per_node=ranks_per_node) <= 8
    assert not needs_whole_nodes(8, num_ranks=num_ranks, ranks_per_node=ranks_per_node)


@pytest.mark.lengthy
@pytest.mark.parametrize(("ranks_per_node", "least"), [(1, 4), (2, 3), (3, 5), (4, 5), (5, 4), (8, 4), (16, 4)])
def test_rings_over_whole_nodes_alone_need_about_four(ranks_per_node: int, least: int) -> None:
    machine = {"num_ranks": 12 * ranks_per_node, "ranks_per_node": ranks_per_node}
    assert most_peers(True, **machine) == least
    with pytest.raises(UsageError, match=f"give --max-peers {least} or more"):
        needs_whole_nodes(least - 1, **machine)


def test_what_ten_nodes_need_is_what_more_need() -> None:
    for whole_nodes in (False, True):
        least = most_peers(whole_nodes, num_ranks=40, ranks_per_node=4)
        assert least == most_peers(whole_nodes, num_ranks=10_000, ranks_per_node=4)


def test_a_limit_that_no_plan_could_exceed_changes_nothing() -> None:
    batches = four_steps("iteration", num_ranks=8, ranks_per_node=4)
    for limited, free in zip(planned(batches, 7), planned(batches, None), strict=True):
        assert limited.ranks.tolist() == free.ranks.tolist()
        assert limited.makespan_seconds == free.makespan_seconds


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_groups_are_of_neighbouring_ranks_so_no_plan_needs_more_than_eight_peers(sync: Sync) -> None:
    steps = planned(four_steps(sync, num_ranks=64, ranks_per_node=8), None)
    for step in steps:
        firsts, lasts = step.ranks[step.rank_offsets[:-1]], step.ranks[step.rank_offsets[1:] - 1]
        assert (lasts - firsts + 1).tolist() == step.degrees.tolist()
    assert count_peers(steps, num_ranks=64, ranks_per_node=8).most <= 8


def test_a_machine_whose_last_node_is_short_needs_more_peers() -> None:
    with raises(
        "UsageError: --max-peers is 6, but rings of all degrees on 30 ranks, 8 per node, need 8; give --max-peers 8 or more",
    ):
        needs_whole_nodes(6, num_ranks=30, ranks_per_node=8)


def test_two_limits_at_once_are_refused() -> None:
    batches = four_steps("iteration", num_ranks=8, ranks_per_node=4)
    with raises("UsageError: --max-groups and --max-peers both choose the ranks of rings; give one of them"):
        make_solver(batches, max_groups=4, max_peers=8)


def test_a_plan_states_its_limit_and_a_check_proves_it(tmp_path: Path) -> None:
    batches = four_steps("microbatch", num_ranks=24, ranks_per_node=4)
    request = PlanRequest(max_peers=8)
    inputs = PlanInputs(table=batches.table, problem=batches.problem, settings=batches.settings, request=request)
    plan = tmp_path / "plan.parquet"
    result = make_plan(plan, inputs)
    assert result.metadata.solver_options == {"max_peers": 8}
    assert result.summary.peers is not None
    assert result.summary.peers.most == plan_peers(plan).most <= 8
    assert list(check_plan(plan)) == []


@settings(max_examples=40)
@given(num_ranks=st.integers(2, 80), ranks_per_node=st.integers(1, 16))
def test_memory_is_set_aside_for_as_many_peers_as_any_rings_of_neighbours_need(
    num_ranks: int, ranks_per_node: int
) -> None:
    assert most_peers(False, num_ranks=num_ranks, ranks_per_node=ranks_per_node) <= RING_PEERS


def test_no_more_memory_is_set_aside_for_peers_than_some_machine_needs() -> None:
    assert most_peers(False, num_ranks=64, ranks_per_node=8) == RING_PEERS
