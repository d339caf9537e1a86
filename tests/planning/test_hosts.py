"""Plans for hosts that issue slower than their devices compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.problem import Problem, StepPricer
from fcp_cli.planning.solvers import make_solver
from tests.planning.examples import example_problem, first_step, one_batch, problem_with_heads


def with_host(problem: Problem, seconds: float, hop: float = 0.0) -> Problem:
    c = problem.profile.coefficients
    priced = replace(c, host_microbatch_seconds=seconds, host_hop_seconds=hop, microbatch_seconds=0.0)
    return replace(problem, profile=replace(problem.profile, coefficients=priced))


def short(count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(0).lognormal(6.2, 0.8, count).astype(int).clip(16, 4000).tolist()
    return drawn


@pytest.mark.parametrize(
    ("sync", "tokens_per_rank", "host_seconds", "ratio"),
    [("iteration", 2048, 0.5, 0.85), ("microbatch", 4096, 1.0, 0.7)],
)
def test_packs_that_wait_for_their_hosts_are_fuller_and_fewer(
    sync: Sync, tokens_per_rank: int, host_seconds: float, ratio: float
) -> None:
    blind = with_host(example_problem(sync, num_ranks=8, tokens_per_rank=tokens_per_rank), 0.0)
    slow = with_host(blind, host_seconds)
    lengths = short(120)
    unaware = first_step(one_batch(lengths, blind))
    aware = first_step(one_batch(lengths, slow))
    batches = one_batch(lengths, slow)
    repriced = assemble(make_solver("fcp", one_batch(lengths, blind)).assign(batches.batch(0)), batches.batch(0), slow)
    assert aware.makespan_seconds < ratio * repriced.makespan_seconds
    assert len(aware.seconds) < len(unaware.seconds)
    assert aware.gap < 0.01


def test_a_ring_is_narrower_if_the_host_takes_longer_over_its_hops_than_it_saves() -> None:
    problem = example_problem(num_ranks=8, ranks_per_node=8)
    rings = first_step(one_batch([16_000], with_host(problem, 0.1, hop=0.05)))
    none = first_step(one_batch([16_000], with_host(problem, 0.1, hop=7.0)))
    assert len(rings.ranks) == 8 and none.rank_offsets[1] == 1


@pytest.mark.parametrize("name", ["distca", "magi-attention", "skrull", "zeppelin"])
def test_executions_without_rings_wait_for_their_hosts_too(name: str) -> None:
    problem = with_host(problem_with_heads(8), 50.0)
    solver = make_solver(name, one_batch(short(8), problem))
    assert isinstance(solver, StepPricer)
    assert solver.price(one_batch(short(8), problem).batch(0)).seconds >= 50.0
