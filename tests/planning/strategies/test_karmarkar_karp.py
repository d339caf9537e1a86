from __future__ import annotations

from itertools import product
from typing import get_args

import numpy as np
import pytest

from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.make_plan import plan_step
from fcp_cli.planning.static import holding_degrees
from fcp_cli.planning.strategies.karmarkar_karp import Balance, make_solver, solver_of
from tests.planning.examples import example_problem, first_step, long_tail, one_batch


def batches_of_long_tail() -> GlobalBatches:
    return GlobalBatches(long_tail(400), example_problem(), BatchSettings(global_batch_size=403))


def test_degrees_are_divisors_that_hold_the_longest_sequence() -> None:
    problem = example_problem(num_ranks=12, ranks_per_node=4, tokens_per_rank=1000)
    batches = one_batch([3500], problem)
    assert holding_degrees(batches) == [4, 6, 12]


def test_the_setting_is_the_quickest_over_the_plan() -> None:
    batches = batches_of_long_tail()
    chosen = first_step(batches, make_solver).makespan_seconds
    for setting in product(holding_degrees(batches), get_args(Balance)):
        other = plan_step(batches.batch(0), batches.problem, solver_of(batches.problem, *setting))
        assert chosen <= other.makespan_seconds


@pytest.mark.parametrize("balance", get_args(Balance))
def test_every_group_has_the_one_degree(balance: Balance) -> None:
    batches = batches_of_long_tail()
    step = plan_step(batches.batch(0), batches.problem, solver_of(batches.problem, 8, balance))
    assert set(step.degrees[step.tokens > 0].tolist()) == {8}


def test_packs_are_spread_in_equal_numbers() -> None:
    batches = batches_of_long_tail()
    step = plan_step(batches.batch(0), batches.problem, solver_of(batches.problem, 8, "packs"))
    counts = np.bincount(step.ranks[step.rank_offsets[:-1]] // 8)
    assert counts.max() - counts.min() <= 1


def test_the_fullest_packs_are_split_until_every_rank_gets_equally_many() -> None:
    problem = example_problem(num_ranks=2, ranks_per_node=2, tokens_per_rank=1000)
    batches = one_batch([300, 600, 500, 200, 400], problem)
    solver = solver_of(problem, 1, "split")
    step = plan_step(batches.batch(0), problem, solver)
    # First-fit fills 300 + 600, 500 + 200, 400; the first of them is split, and two go to either rank.
    packs = [sorted(row.lengths) for row in step.microbatches() if row.lengths]
    assert sorted(packs) == [[200, 500], [300], [400], [600]]
    assert np.bincount(step.ranks[step.rank_offsets[:-1]]).tolist() == [2, 2]
