from __future__ import annotations

from dataclasses import replace

import pytest

from fcp_cli.planning.strategies.zeppelin import make_solver
from tests.planning.examples import one_batch, problem_with_heads
from tests.planning.strategies.test_spread_attention import priced


def test_a_sequence_that_no_rank_holds_is_shared_by_a_node_or_by_all() -> None:
    problem = problem_with_heads(16)
    batch = one_batch([60_000], problem).batch(0)
    seconds = priced("zeppelin", [60_000], problem).seconds
    # Its attention is that of sixteen ranks or of eight at best, all other layers are shared by sixteen.
    attention, linear = batch.work.attention_seconds.sum(), batch.work.linear_seconds.sum()
    assert 0.1 + (attention + linear) / 16 <= seconds <= 0.1 + (attention + linear) / 8


def test_tokens_are_remapped_only_if_that_is_quicker_than_other_layers_on_uneven_tokens() -> None:
    two_ranks = problem_with_heads(2)
    profile = two_ranks.profile
    assert profile.heads is not None
    dear_ring = replace(profile, coefficients=replace(profile.coefficients, ring_bytes_per_token=1e12))
    problem, dear = replace(two_ranks, profile=dear_ring), replace(profile.heads, exchange_bytes_per_token=1e12)
    batches = one_batch([4000, 200], problem)
    work, made = batches.batch(0).work, make_solver(batches)
    assert made.rank_seconds(replace(made, heads=dear), work).max() == pytest.approx(0.1 + work.total_seconds[0])
    free = replace(profile.heads, exchange_bytes_per_token=0.0, key_value_exchange_bytes_per_token=0.0)
    even = 0.1 + work.attention_seconds[0] + work.linear_seconds.sum() / 2
    assert made.rank_seconds(replace(made, heads=free), work).max() == pytest.approx(even)
