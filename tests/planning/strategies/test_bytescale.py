from __future__ import annotations

import numpy as np

from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.drafts import Draft
from fcp_cli.planning.strategies.bytescale import balance, in_waves_of_like_time, make_solver
from tests.planning.examples import example_problem, first_step, long_tail, one_batch


def test_a_long_sequence_takes_as_many_ranks_as_it_has_chunks() -> None:
    problem = example_problem(num_ranks=8, ranks_per_node=8, tokens_per_rank=1000)
    batches = one_batch([4500, 900], problem)
    long, short = balance(batches.batch(0), problem, tokens_per_rank=1000)
    assert len(long.ranks) == 5 and long.members == [0]
    assert len(short.ranks) == 1 and short.ranks[0] not in long.ranks


def test_a_long_sequence_stays_on_one_node_where_it_fits() -> None:
    problem = example_problem(num_ranks=8, ranks_per_node=4, tokens_per_rank=1000)
    batches = one_batch([3000] * 4, problem)
    for draft in balance(batches.batch(0), problem, tokens_per_rank=1000):
        assert draft.ranks[0] // 4 == draft.ranks[-1] // 4


def test_ranks_run_different_numbers_of_microbatches() -> None:
    problem = example_problem("iteration")
    batches = GlobalBatches(long_tail(400), problem, BatchSettings(global_batch_size=403))
    step = first_step(batches, make_solver)
    assert len(set(np.bincount(step.ranks).tolist())) > 1


def test_waves_hold_microbatches_of_like_time() -> None:
    problem = example_problem("microbatch", num_ranks=2, ranks_per_node=2, tokens_per_rank=1000)
    batches = one_batch([1000, 990, 20, 10], problem)
    drafts = [Draft([0], [0]), Draft([1], [2]), Draft([0], [3]), Draft([1], [1])]
    waves = in_waves_of_like_time(drafts, batches.batch(0), problem)
    assert waves.wave.tolist() == [0, 0, 1, 1]
    assert waves.members.tolist() == [0, 1, 2, 3]
