from __future__ import annotations

import numpy as np

from fcp_cli.planning.baselines.drafts import Draft
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.dataset.run import plan_step
from fcp_cli.planning.published.bytescale import balance, in_waves_of_like_time, make_solver
from tests.planning.examples import example_problem, long_tail, table_of


def test_a_long_sequence_takes_as_many_ranks_as_it_has_chunks() -> None:
    problem = example_problem(num_ranks=8, ranks_per_node=8, tokens_per_rank=1000)
    batches = GlobalBatches(table_of([4500, 900]), problem, BatchSettings(global_batch_size=2, shuffle=False))
    long, short = balance(batches.batch(0), problem, tokens_per_rank=1000)
    assert len(long.ranks) == 5 and long.members == [0]
    assert len(short.ranks) == 1 and short.ranks[0] not in long.ranks


def test_a_long_sequence_stays_on_one_node_where_it_fits() -> None:
    problem = example_problem(num_ranks=8, ranks_per_node=4, tokens_per_rank=1000)
    batches = GlobalBatches(table_of([3000] * 4), problem, BatchSettings(global_batch_size=4, shuffle=False))
    for draft in balance(batches.batch(0), problem, tokens_per_rank=1000):
        assert draft.ranks[0] // 4 == draft.ranks[-1] // 4


def test_ranks_run_different_numbers_of_microbatches() -> None:
    problem = example_problem("iteration")
    batches = GlobalBatches(long_tail(400), problem, BatchSettings(global_batch_size=403))
    step = plan_step(batches.batch(0), problem, make_solver(batches))
    assert len(set(np.bincount(step.ranks).tolist())) > 1


def test_waves_hold_microbatches_of_like_time() -> None:
    problem = example_problem("microbatch", num_ranks=2, ranks_per_node=2, tokens_per_rank=1000)
    batches = GlobalBatches(table_of([1000, 990, 20, 10]), problem, BatchSettings(global_batch_size=4, shuffle=False))
    drafts = [Draft([0], [0]), Draft([1], [2]), Draft([0], [3]), Draft([1], [1])]
    waves = in_waves_of_like_time(drafts, batches.batch(0), problem)
    assert waves.wave.tolist() == [0, 0, 1, 1]
    assert waves.members.tolist() == [0, 1, 2, 3]
