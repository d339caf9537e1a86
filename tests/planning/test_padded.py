"""`padded`: a loader's batches, each as long as its longest sequence."""

from __future__ import annotations

import numpy as np
import pytest

from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.compare import compare
from fcp_cli.planning.padded import Padded, make_solver
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import compared_names, solver_names
from tests.planning.examples import example_problem, table_of


def problem_of(tokens_per_rank: int) -> Problem:
    return example_problem(num_ranks=2, ranks_per_node=2, tokens_per_rank=tokens_per_rank)


def batches_of(lengths: list[int], *, tokens_per_rank: int) -> GlobalBatches:
    given = BatchSettings(global_batch_size=len(lengths), shuffle=False)
    return GlobalBatches(table_of(lengths), problem_of(tokens_per_rank), given)


def test_neighbours_run_together_as_long_as_their_longest_and_ranks_take_turns() -> None:
    batches = batches_of([10, 90, 30, 40, 20, 20, 5], tokens_per_rank=1000)
    solver = Padded(batches.problem, batches.table, degree=1, rows_per_pass=2)
    found, run = solver.assign(batches.batch(0)), solver.padded(batches.batch(0))
    assert found.ranks.tolist() == [0, 1, 0, 1]
    assert np.split(found.members, found.member_offsets[1:-1])[0].tolist() == [0, 1]
    assert run.lengths.tolist() == [90, 90, 40, 40, 20, 20, 5]
    assert run.work.tokens.tolist() == run.lengths.tolist()


def test_a_batch_has_as_many_rows_as_the_quickest_of_those_that_hold_the_longest() -> None:
    # A micro-batch takes 0.1 s in itself, so that more rows are quicker as long as they fit.
    assert make_solver(batches_of([100] * 16, tokens_per_rank=850)).options == {"degree": 1, "rows_per_pass": 8}
    assert make_solver(batches_of([100] * 16, tokens_per_rank=350)).options == {"degree": 1, "rows_per_pass": 2}
    assert make_solver(batches_of([100] * 16, tokens_per_rank=60)).options == {"degree": 2, "rows_per_pass": 1}


def test_a_comparison_prices_the_padding_and_keeps_the_bound_of_the_sequences() -> None:
    lengths = [4000, 10, 4000, 10]
    batches = batches_of(lengths, tokens_per_rank=8000)
    problem = batches.problem
    (padded,) = compare(
        batches.table, problem, batches.settings, names=["padded"], syncs=["iteration"], milp_seconds=1.0
    )
    outcome = padded.outcomes["iteration"]
    both = causal_work(np.array([4000, 4000]), problem.profile.coefficients).packed(np.array([0]))
    assert outcome.options == {"degree": 1, "rows_per_pass": 2} and outcome.over_budget == 0
    assert outcome.step_seconds == pytest.approx(
        float(group_seconds(problem.profile, both, degree=1, crosses_nodes=False)[0])
    )
    bound = lower_bound_seconds(batches.batch(0).work, problem)
    assert outcome.gap == pytest.approx(outcome.step_seconds / bound - 1)


def test_it_is_compared_and_makes_no_plan() -> None:
    assert "padded" in compared_names() and "padded" not in solver_names()
