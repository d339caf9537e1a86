"""The solver `fcp`: whole, legal, deterministic answers for any machine and any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp_solver import make_solver, solver_of
from fcp_cli.planning.kernel_inputs import by_falling_work, planner_inputs
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.searches import wave_parts
from fcp_cli.planning.static import static_candidates
from fcp_cli.planning.strategies import karmarkar_karp
from tests.planning.examples import first_step

_PROFILE = """\
format: fcp-cost-profile/1
model: m
cluster: c
origin: assumed
coefficients:
  attention_seconds_per_token2: {alpha1}
  linear_seconds_per_token: 2.838e-4
  ring_bytes_per_token: 442368
  microbatch_seconds: {beta}
  ring_hop_seconds: {hop}
  vision_seconds_per_patch: 1.0e-4
bandwidth_bytes_per_second: {{intra_node: 50.0e+9, inter_node: {inter}}}
"""


def a_problem(
    sync: Sync,
    *,
    num_ranks: int = 16,
    ranks_per_node: int = 4,
    budget: int = 4096,
    alpha1: str = "6.451e-9",
    beta: str = "0.1",
    hop: str = "0.0",
    inter: str = "12.0e+9",
) -> Problem:
    text = _PROFILE.format(alpha1=alpha1, beta=beta, hop=hop, inter=inter)
    return Problem(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tokens_per_rank=budget,
        sync=sync,
        profile=parse_cost_profile(text, name="test"),
    )


def one_batch(lengths: Sequence[int], problem: Problem, *, patches: Sequence[int] | None = None) -> GlobalBatches:
    table = LengthTable(
        name="lengths",
        length_tokens=np.array(lengths, dtype=np.int64),
        eta=np.linspace(0.0, 1.0, len(lengths)) if patches else None,
        vision_patches=None if patches is None else np.array(patches, dtype=np.int64),
    )
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=len(lengths), shuffle=False))


def planned(lengths: Sequence[int], problem: Problem) -> StepPlan:
    return first_step(one_batch(lengths, problem))


def drawn(sync: Sync, data: st.DataObject) -> GlobalBatches:
    """Any batch on any machine."""
    num_ranks = data.draw(st.integers(1, 24), label="num_ranks")
    budget = data.draw(st.sampled_from([64, 1000, 8192]), label="budget")
    problem = a_problem(
        sync,
        num_ranks=num_ranks,
        ranks_per_node=data.draw(st.integers(1, 9), label="ranks_per_node"),
        budget=budget,
        alpha1=data.draw(st.sampled_from(["0", "6.451e-9", "1.0e-5"]), label="alpha1"),
        beta=data.draw(st.sampled_from(["0", "0.1", "5.0"]), label="beta"),
        hop=data.draw(st.sampled_from(["0", "0.05"]), label="hop"),
        inter=data.draw(st.sampled_from(["12.0e+9", "1.0e+7"]), label="inter"),
    )
    any_length = st.one_of(st.integers(1, budget), st.integers(1, budget * num_ranks))
    lengths = data.draw(st.lists(any_length, min_size=1, max_size=40), label="lengths")
    patches = data.draw(st.one_of(st.none(), st.just([7 * length % 999 for length in lengths])), label="patches")
    return one_batch(lengths, problem, patches=patches)


SYNCS = pytest.mark.parametrize("sync", ["iteration", "microbatch"])


@pytest.mark.boundscheck
@SYNCS
@settings(max_examples=60)
@given(data=st.data())
def test_any_batch_on_any_machine_gets_a_legal_plan_that_no_bound_exceeds(sync: Sync, data: st.DataObject) -> None:
    batches = drawn(sync, data)
    step = first_step(batches)
    assert step.makespan_seconds >= step.bound_seconds * (1 - 1e-9)


@SYNCS
def test_the_same_batch_gives_the_same_step(sync: Sync) -> None:
    lengths = (np.random.default_rng(3).pareto(1.0, 200) * 500 + 64).clip(64, 40_000).astype(int).tolist()
    first = planned(lengths, a_problem(sync))
    second = planned(lengths, a_problem(sync))
    np.testing.assert_array_equal(first.ranks, second.ranks)
    np.testing.assert_array_equal(first.sequences, second.sequences)
    np.testing.assert_array_equal(first.start_seconds, second.start_seconds)


def test_a_group_no_wider_than_a_node_stays_inside_one() -> None:
    lengths = [16_000, 15_000, 14_000, 9_000, *[700] * 120]
    step = planned(lengths, a_problem("microbatch"))
    for microbatch in step.microbatches():
        if microbatch.degree <= 4:
            assert len({rank // 4 for rank in microbatch.ranks}) == 1


def test_short_sequences_ride_in_a_ring_that_has_tokens_to_spare() -> None:
    problem = a_problem("iteration", num_ranks=4, ranks_per_node=4, budget=8192)
    step = planned([18_000, *[512] * 20], problem)
    assert len(step) <= 4  # the ring takes three ranks; the rest neither needs nor gets more than a pack each


@SYNCS
def test_equal_short_sequences_are_shared_evenly(sync: Sync) -> None:
    step = planned([1000] * 64, a_problem(sync, num_ranks=16, budget=4096))
    assert step.gap < 1e-6


@pytest.mark.lengthy
@pytest.mark.boundscheck
@SYNCS
@settings(max_examples=30)
@given(data=st.data())
def test_no_static_degree_is_quicker(sync: Sync, data: st.DataObject) -> None:
    batches = drawn(sync, data)
    solver = make_solver(batches, max_groups=data.draw(st.sampled_from([None, None, 1, 4]), label="max_groups"))
    batch = batches.batch(0)
    seconds = makespan_seconds(solver.assign(batch), batch, batches.problem)
    for static in static_candidates(batches.problem, int(batch.lengths.max())):
        if static.degree in solver.degrees:  # all of them, but where the groups are limited
            assert seconds <= makespan_seconds(static.assign(batch), batch, batches.problem) * (1 + 1e-9), (
                static.options
            )


@settings(max_examples=40)
@given(data=st.data())
def test_timelines_never_take_longer_than_waves(data: st.DataObject) -> None:
    batches = drawn("iteration", data)
    batch = batches.batch(0)
    waiting = replace(batches.problem, sync="microbatch")
    waves = solver_of(waiting).assign(batch)
    seconds = makespan_seconds(solver_of(batches.problem).assign(batch), batch, batches.problem)
    # Without waiting for each other, ranks run the same micro-batches in the same order.
    assert seconds <= makespan_seconds(waves, batch, waiting) * (1 + 1e-9)


def test_hundreds_of_waves_are_planned_in_parts_near_the_bound() -> None:
    random = np.random.default_rng(2)
    lengths = np.append(random.integers(100, 1000, 1500), random.integers(4000, 12_000, 60)).tolist()
    problem = a_problem("microbatch", num_ranks=4, ranks_per_node=4, budget=3072)
    batches = one_batch(lengths, problem)
    _order, sequences = by_falling_work(batches.batch(0).work)
    assert len(wave_parts(sequences, planner_inputs(problem))) > 2
    assert planned(lengths, problem).gap < 0.02


def test_a_limit_on_rank_sets_leaves_the_static_degrees_that_need_no_others() -> None:
    batches = one_batch([1000] * 64, a_problem("microbatch"))
    assert make_solver(batches).degrees.tolist() == [1, 2, 4, 8, 16]
    assert make_solver(batches, max_groups=1).degrees.tolist() == [1, 16]


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@pytest.mark.parametrize("kind", ["uniform", "pareto", "bimodal", "equal", "just over a budget", "a giant and dust"])
def test_number_partitioning_is_never_quicker_by_more_than_a_thousandth(kind: str, sync: Sync) -> None:
    budget, random = 16384, np.random.default_rng(5)
    lengths = {
        "uniform": random.integers(100, 4 * budget, 128),
        "pareto": np.minimum((random.pareto(1.2, 128) + 1) * 800, 12 * budget).astype(np.int64),
        "bimodal": np.concatenate((random.integers(200, 900, 112), random.integers(30_000, 60_000, 16))),
        "equal": np.full(128, budget // 2 + 1),
        "just over a budget": random.integers(budget + 1, budget + 200, 128),
        "a giant and dust": np.concatenate((random.integers(20, 300, 127), [12 * budget])),
    }[kind]
    problem = a_problem(sync, num_ranks=32, ranks_per_node=8, budget=budget, hop="1e-5")
    batches = one_batch(lengths.tolist(), problem)
    batch = batches.batch(0)

    ours, theirs = (
        makespan_seconds(make(batches).assign(batch), batch, problem)
        for make in (make_solver, karmarkar_karp.make_solver)
    )

    assert ours <= theirs * 1.001
