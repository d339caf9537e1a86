from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.workloads import family_table
from fcp_cli.errors import UsageError
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.compare import compare
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.strategies.spread_attention import tuned
from tests.planning.examples import example_problem, one_batch, problem_with_heads

NAMES = ["block-fcp", "distca", "magi-attention", "skrull", "zeppelin"]


def priced(name: str, lengths: list[int], problem: Problem) -> Any:
    batches = one_batch(lengths, problem)
    return make_solver(name, batches).price(batches.batch(0))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_runs_what_it_holds_as_a_plan_would(name: str) -> None:
    problem = problem_with_heads(1)
    batch = one_batch([4000, 100], problem).batch(0)
    step = priced(name, [4000, 100], problem)
    assert step.seconds == step.busy_rank_seconds == pytest.approx(0.1 + batch.work.total_seconds.sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sync", ["microbatch", "iteration"])
def test_no_step_is_quicker_than_its_bound_or_than_a_rank_is_busy(name: str, sync: Any) -> None:
    for family in ("github", "extreme"):
        table = family_table(family, sequences=64, seed=3)
        problem = replace(problem_with_heads(16, 16_384), sync=sync)
        (found,) = compare(
            table, problem, BatchSettings(global_batch_size=64, shuffle=False), names=[name], milp_seconds=1.0
        )
        assert found.outcomes[sync].gap >= 0.0
        assert 0.0 <= found.outcomes[sync].idle_fraction < 0.8


@pytest.mark.parametrize("name", NAMES)
def test_slower_links_never_make_a_step_quicker(name: str) -> None:
    lengths = [60_000, 9000, 9000, *[500] * 20]
    problem = problem_with_heads(16)
    profile = problem.profile
    slow = replace(profile.bandwidth, inter_node=profile.bandwidth.inter_node / 1000, intra_node=1e8)
    seconds = [
        priced(name, lengths, one).seconds
        for one in (problem, replace(problem, profile=replace(profile, bandwidth=slow)))
    ]
    assert seconds[1] > 2 * seconds[0]


def test_what_is_fetched_again_in_the_backward_counts_twice_and_its_gradients_once() -> None:
    problem = problem_with_heads(2)
    one = tuned("one", one_batch([10], problem), lambda *_: np.zeros(2), degrees=[2])
    keys = np.array([[5.0, 900.0], [0.0, 7.0]])  # rank 0 fetches 900 tokens from rank 1; its own cost nothing
    whole = problem.profile.coefficients.ring_bytes_per_token * 900 / problem.profile.bandwidth.intra_node
    assert one.message_seconds(keys, kept=False) == pytest.approx([whole * 2 / 3, whole / 3])


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_without_the_price_of_heads_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} needs a cost profile with the block heads"):
        make_solver(name, one_batch([10], example_problem()))
