"""A plan without rings keeps every sequence on one rank, and takes hardly longer than the best that this allows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import plan_writer
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.fcp_solver import limit_price, make_solver
from fcp_cli.planning.make_plan import plan_metadata
from tests.messages import raises
from tests.planning.examples import example_problem, first_step, four_steps, one_batch

BUDGET_TOKENS = 4096


@pytest.mark.boundscheck
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@settings(max_examples=8)
@given(num_ranks=st.integers(1, 40), seed=st.integers(0, 99))
def test_no_group_has_two_ranks_and_ranks_are_balanced(sync: Sync, num_ranks: int, seed: int) -> None:
    batches = four_steps(sync, num_ranks=num_ranks, seed=seed, most_tokens=BUDGET_TOKENS)
    solver = make_solver(batches, max_degree=1)
    assert solver.options == {"max_degree": 1}
    for batch in batches:
        step = assemble(solver.assign(batch), batch, batches.problem)  # proves the rules of a plan
        assert (np.diff(step.rank_offsets) == 1).all()
        if sync == "iteration":  # no rank can end before the longest sequence, nor all before their mean
            c = batches.problem.profile.coefficients
            longest = float(batch.work.total_seconds.max()) + c.microbatch_seconds
            best = max(longest, lower_bound_seconds(batch.work, batches.problem))
            assert step.makespan_seconds <= 1.15 * best


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, BUDGET_TOKENS), min_size=1, max_size=6), num_ranks=st.integers(2, 12))
def test_pipelines_without_rings_have_none_even_if_ranks_idle(lengths: list[int], num_ranks: int) -> None:
    stages = Pipeline(forward_share=0.3, head_share=0.1)
    problem = example_problem("microbatch", num_ranks=num_ranks, tokens_per_rank=BUDGET_TOKENS)
    batches = one_batch(lengths, replace(problem, pipeline_parallel=2, pipeline=stages))
    assert set(first_step(batches, partial(make_solver, max_degree=1)).degrees) == {1}


def test_what_rings_would_save_is_the_limits_price() -> None:
    batches = four_steps("iteration", num_ranks=8, seed=5, most_tokens=BUDGET_TOKENS)
    assert -0.02 < limit_price(make_solver(batches, max_degree=1), batches) < 0.3


def test_a_sequence_that_needs_a_ring_is_refused_with_what_helps() -> None:
    batches = four_steps("iteration", num_ranks=8, seed=5, most_tokens=9000)
    with raises(
        "UsageError: --max-degree 1 forbids rings, but a sequence has 9000 tokens and a rank holds 4096; drop longer ones with --max-length 4096 --overlong drop (truncate cuts them), hold them with --tokens-per-rank 9000, or remove --max-degree",
    ):
        make_solver(batches, max_degree=1)


def test_a_ring_in_a_plan_that_states_none_is_found(tmp_path: Path) -> None:
    batches = four_steps("iteration", num_ranks=8, seed=5, most_tokens=9000)
    solver = make_solver(batches)
    metadata = replace(plan_metadata(batches.table, batches, solver), solver_options={"max_degree": 1})
    with plan_writer(tmp_path / "plan.parquet", metadata) as writer:
        for batch in batches:
            writer.append(assemble(solver.assign(batch), batch, batches.problem))
    messages = [finding.message for finding in check_plan(tmp_path / "plan.parquet")]
    assert [message for message in messages if "its metadata states at most 1 (max_degree)" in message]
