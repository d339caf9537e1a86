"""The solver `fcp`: whole, legal, deterministic answers for any machine and any batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp.solver import make_solver
from fcp_cli.planning.problem import Batch, Problem
from fcp_cli.planning.published.static import best_static

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


def planned(
    lengths: Sequence[int], problem: Problem, *, patches: Sequence[int] | None = None
) -> tuple[StepPlan, Batch]:
    table = LengthTable(
        name="lengths",
        length_tokens=np.array(lengths, dtype=np.int64),
        eta=np.linspace(0.0, 1.0, len(lengths)) if patches else None,
        vision_patches=None if patches is None else np.array(patches, dtype=np.int64),
    )
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(lengths), shuffle=False))
    batch = batches.batch(0)
    # assemble() checks coverage, budgets, ranks and waves.
    return assemble(make_solver(batches).assign(batch), batch, problem), batch


SYNCS = pytest.mark.parametrize("sync", ["iteration", "microbatch"])


@SYNCS
@settings(max_examples=60)
@given(data=st.data())
def test_any_batch_on_any_machine_gets_a_legal_plan_that_no_bound_exceeds(sync: Sync, data: st.DataObject) -> None:
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
    step, _ = planned(lengths, problem, patches=patches)
    assert step.makespan_seconds >= step.bound_seconds * (1 - 1e-9)


@SYNCS
def test_the_same_batch_gives_the_same_step(sync: Sync) -> None:
    lengths = (np.random.default_rng(3).pareto(1.0, 200) * 500 + 64).clip(64, 40_000).astype(int).tolist()
    first, _ = planned(lengths, a_problem(sync))
    second, _ = planned(lengths, a_problem(sync))
    np.testing.assert_array_equal(first.ranks, second.ranks)
    np.testing.assert_array_equal(first.sequences, second.sequences)
    np.testing.assert_array_equal(first.start_seconds, second.start_seconds)


def test_a_group_no_wider_than_a_node_stays_inside_one() -> None:
    lengths = [16_000, 15_000, 14_000, 9_000, *[700] * 120]
    step, _ = planned(lengths, a_problem("microbatch"))
    for micro_batch in step.micro_batches():
        if micro_batch.degree <= 4:
            assert len({rank // 4 for rank in micro_batch.ranks}) == 1


def test_short_sequences_ride_in_a_ring_that_has_tokens_to_spare() -> None:
    problem = a_problem("iteration", num_ranks=4, ranks_per_node=4, budget=8192)
    step, _ = planned([18_000, *[512] * 20], problem)
    assert len(step) <= 4  # the ring takes three ranks; the rest neither needs nor gets more than a pack each


@SYNCS
def test_equal_short_sequences_are_shared_evenly(sync: Sync) -> None:
    step, _ = planned([1000] * 64, a_problem(sync, num_ranks=16, budget=4096))
    assert step.gap < 1e-6


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
def test_few_ranks_are_never_planned_worse_than_by_the_best_static_degree(sync: Sync, num_ranks: int) -> None:
    generator = np.random.default_rng(num_ranks)
    for _ in range(5):
        lengths = np.minimum(generator.lognormal(7.0, 1.2, 24).astype(int) + 1, 2 * 4096)
        problem = a_problem(sync, num_ranks=num_ranks, ranks_per_node=num_ranks, budget=4096)
        step, batch = planned(lengths.tolist(), problem)
        _, static_seconds = best_static(problem, int(lengths.max()), [batch])
        assert step.makespan_seconds <= static_seconds * (1 + 1e-9) or step.gap <= 0.01
