"""A limit on rank sets holds over a whole plan, and is honoured on machines of any shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp.catalogue import rank_sets
from fcp_cli.planning.fcp.solver import group_limit_price, make_solver
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver as make_named_solver

_PROFILE = """\
format: fcp-cost-profile/1
model: m
cluster: c
origin: assumed
coefficients:
  attention_seconds_per_token2: 6.451e-9
  linear_seconds_per_token: 2.838e-4
  ring_bytes_per_token: 442368
  microbatch_seconds: 0.1
bandwidth_bytes_per_second: {intra_node: 50.0e+9, inter_node: 12.0e+9}
"""


def some_batches(sync: Sync, *, num_ranks: int = 16, ranks_per_node: int = 4) -> GlobalBatches:
    """Four steps of short sequences and a long tail."""
    drawn = 500 * (np.random.default_rng(5).pareto(1.0, 400) + 1)
    return GlobalBatches(
        LengthTable(name="lengths", length_tokens=drawn.clip(64, 4096 * num_ranks).astype(np.int64)),
        Problem(
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            tokens_per_rank=4096,
            sync=sync,
            profile=parse_cost_profile(_PROFILE, name="test"),
        ),
        BatchSettings(global_batch_size=100),
    )


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@settings(max_examples=25, deadline=None)
@given(max_groups=st.integers(1, 20), num_ranks=st.integers(2, 20), ranks_per_node=st.integers(1, 8))
def test_no_more_rank_sets_than_allowed(sync: Sync, max_groups: int, num_ranks: int, ranks_per_node: int) -> None:
    batches = some_batches(sync, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    solver = make_solver(batches, max_groups=max_groups)
    groups = set()
    for batch in batches:
        step = assemble(solver.assign(batch), batch, batches.problem)
        groups |= {micro_batch.ranks for micro_batch in step.micro_batches() if micro_batch.degree > 1}
    assert len(groups) <= max_groups
    assert solver.options == {"max_groups": max_groups}


def test_whole_nodes_come_before_parts_of_nodes() -> None:
    sets = rank_sets(7, num_ranks=16, ranks_per_node=4)
    assert [(s.start, s.stop) for s in sets] == [(0, 16), (0, 8), (8, 16), (0, 4), (4, 8), (8, 12), (12, 16)]


def test_three_nodes_are_a_set_before_parts_of_nodes() -> None:
    assert range(12) in rank_sets(8, num_ranks=16, ranks_per_node=4)


def test_no_set_is_listed_twice() -> None:
    for num_ranks in range(2, 40):
        sets = rank_sets(100, num_ranks=num_ranks, ranks_per_node=3)
        assert len(set(sets)) == len(sets)


def test_the_price_of_a_limit_grows_as_the_limit_falls() -> None:
    batches = some_batches("iteration")
    assert group_limit_price(batches, 1) > group_limit_price(batches, 15)


def test_a_limit_of_no_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-groups is 0; at least one group"):
        make_solver(some_batches("iteration"), max_groups=0)


def test_a_published_solver_takes_no_limit() -> None:
    with pytest.raises(UsageError, match="--max-groups works with --solver fcp only, not with static"):
        make_named_solver("static", some_batches("iteration"), max_groups=4)
