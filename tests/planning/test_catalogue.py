"""A limit on groups holds over a whole plan, and is honoured on machines of any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.errors import UsageError
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.fcp_solver import limit_price, make_solver
from fcp_cli.planning.groups import choose_groups, tree_groups
from tests.planning.examples import four_steps


@pytest.mark.lengthy
@pytest.mark.boundscheck
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@settings(max_examples=8)
@given(max_groups=st.integers(1, 20), num_ranks=st.integers(2, 20), ranks_per_node=st.integers(1, 8))
def test_no_more_rank_sets_than_allowed(sync: Sync, max_groups: int, num_ranks: int, ranks_per_node: int) -> None:
    batches = four_steps(sync, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    solver = make_solver(batches, max_groups=max_groups)
    groups = set()
    for batch in batches:
        step = assemble(solver.assign(batch), batch, batches.problem)
        groups |= {microbatch.ranks for microbatch in step.microbatches() if microbatch.degree > 1}
    assert len(groups) <= max_groups
    assert solver.options == {"max_groups": max_groups}


def test_whole_nodes_come_before_parts_of_nodes() -> None:
    groups = tree_groups(7, num_ranks=16, ranks_per_node=4)
    assert [(s.start, s.stop) for s in groups] == [(0, 16), (0, 8), (8, 16), (0, 4), (4, 8), (8, 12), (12, 16)]


def test_three_nodes_are_a_set_before_parts_of_nodes() -> None:
    assert range(12) in tree_groups(8, num_ranks=16, ranks_per_node=4)


def test_no_set_is_listed_twice() -> None:
    for num_ranks in range(2, 40):
        groups = tree_groups(100, num_ranks=num_ranks, ranks_per_node=3)
        assert len(set(groups)) == len(groups)


def test_the_sets_that_a_sample_uses_most_are_kept() -> None:
    used = {range(16): 1, range(5): 30, range(8, 11): 20, range(4, 8): 10}

    def trial(groups: list[range]) -> tuple[float, dict[range, int]]:
        return 10.0 - sum(s in groups for s in used), {s: n for s, n in used.items() if s in groups}

    assert choose_groups(4, num_ranks=16, ranks_per_node=8, trial=trial) == [
        range(16),
        range(5),
        range(4, 8),
        range(8, 11),
    ]


def test_the_tree_is_kept_where_no_choice_is_quicker() -> None:
    groups = choose_groups(5, num_ranks=16, ranks_per_node=4, trial=lambda groups: (1.0, {}))
    assert groups == tree_groups(5, num_ranks=16, ranks_per_node=4)


@settings(max_examples=25)
@given(max_groups=st.integers(1, 40), num_ranks=st.integers(2, 40), ranks_per_node=st.integers(1, 9), data=st.data())
def test_chosen_sets_keep_to_nodes_and_to_the_limit_and_hold_all_ranks(
    max_groups: int, num_ranks: int, ranks_per_node: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))

    def trial(groups: list[range]) -> tuple[float, dict[range, int]]:
        return float(generator.random()), {s: int(generator.integers(9)) for s in groups}

    groups = choose_groups(max_groups, num_ranks=num_ranks, ranks_per_node=ranks_per_node, trial=trial)
    assert len(set(groups)) == len(groups) <= max_groups
    assert range(num_ranks) in groups
    assert all(s.start // ranks_per_node == s[-1] // ranks_per_node for s in groups if len(s) <= ranks_per_node)


@pytest.mark.lengthy
def test_the_price_of_a_limit_grows_as_the_limit_falls() -> None:
    batches = four_steps("iteration", num_ranks=16)
    prices = [limit_price(make_solver(batches, max_groups=limit), batches) for limit in (1, 15)]
    assert prices[0] > prices[1]


@pytest.mark.lengthy
def test_under_waves_sixteen_rank_sets_do_nearly_as_well_as_any() -> None:
    batches = four_steps("microbatch", num_ranks=16)
    assert limit_price(make_solver(batches, max_groups=16), batches) < 0.02


def test_a_limit_of_no_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-groups is 0; at least one group"):
        make_solver(four_steps("iteration", num_ranks=16), max_groups=0)
