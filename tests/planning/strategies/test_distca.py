from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.cost.profile import Heads
from fcp_cli.errors import UsageError
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning.compare import compare
from fcp_cli.planning.strategies.distca import make_solver, rebalanced
from fcp_cli.planning.strategies.spread_attention import Tasks, laid_out
from tests.planning.examples import one_batch, problem_with_heads

HEADS = Heads(
    query_heads=4, key_value_heads=1, exchange_bytes_per_token=8.0, key_value_exchange_bytes_per_token=2.0
)  # of tokens and heads that matter to no test beside the bytes moved


def test_all_ranks_hold_equally_many_tokens_and_a_sequence_is_cut_where_one_is_full() -> None:
    tasks = laid_out(np.array([6, 1, 1]), 2)
    assert tasks.sequence.tolist() == [0, 0, 1, 2]
    assert tasks.tokens.tolist() == [4.0, 2.0, 1.0, 1.0]
    assert tasks.home.tolist() == [0, 1, 1, 1]


def test_tasks_move_until_every_rank_has_nine_tenths_of_the_mean() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 2000, 60)
    tasks = laid_out(lengths, 8)
    per_token = lengths.astype(float)
    before = np.bincount(tasks.rank, tasks.tokens * per_token[tasks.sequence], 8)
    rebalanced(tasks, per_token, lengths, HEADS, 8)
    load = np.bincount(tasks.rank, tasks.tokens * per_token[tasks.sequence], 8)
    assert before.min() < 0.8 * before.mean()
    assert load.min() >= 0.9 * load.mean() * (1 - 1e-9)
    assert load.sum() == pytest.approx(before.sum())
    assert np.bincount(tasks.sequence, tasks.tokens) == pytest.approx(lengths)


def test_a_rank_takes_the_task_that_moves_the_fewest_bytes_a_second() -> None:
    # Rank 1 has next to nothing. A long sequence's queries are worth more seconds for their bytes.
    tasks = Tasks(
        sequence=np.array([0, 1, 2]),
        tokens=np.array([90.0, 10.0, 1.0]),
        home=np.array([0, 0, 1]),
        rank=np.array([0, 0, 1]),
    )
    rebalanced(tasks, np.array([90.0, 10.0, 1.0]), np.array([90, 10, 1]), HEADS, 2)
    assert set(tasks.sequence[tasks.rank != tasks.home].tolist()) == {0}


def test_a_comparison_shows_it_with_the_bound_of_its_own_execution() -> None:
    problem = problem_with_heads(16)
    lengths = np.random.default_rng(1).integers(100, 20_000, 64).tolist()
    batches = one_batch(lengths, problem)
    (found,) = compare(batches.table, problem, batches.settings, names=["distca"], milp_seconds=1.0)
    for outcome in found.outcomes.values():
        assert 0.0 < outcome.gap < 0.2
        assert 0.0 <= outcome.idle_fraction < 0.2
        assert outcome.distinct_groups == outcome.over_budget == 0


def test_a_step_of_more_tokens_than_the_ranks_hold_takes_several_passes() -> None:
    problem = problem_with_heads(2, tokens_per_rank=1000)
    batches = one_batch([900] * 4, problem)
    batch = batches.batch(0)
    assert make_solver(batches).price(batch).seconds == pytest.approx(2 * 0.1 + batch.work.total_seconds.sum() / 2)


def test_pipelines_are_one_line() -> None:
    staged = replace(
        problem_with_heads(2),
        pipeline_parallel=2,
        pipeline=Pipeline(forward_share=0.3, send_seconds=0.0, head_share=0.0),
    )
    with pytest.raises(UsageError, match="distca is priced for ranks of one speed without pipeline stages"):
        make_solver(one_batch([10], staged))
