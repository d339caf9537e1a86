"""Pairs of waves, planned again: what they become is a legal step that ends sooner, or nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.step import offsets_of, sizes_of
from fcp_cli.planning import searches
from fcp_cli.planning.assemble import check_assignment, makespan_seconds
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.kernel_inputs import by_falling_work, planner_inputs
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.searches import assign_waves, regrouped
from tests.planning.examples import example_problem, table_of


def alone_on_all_ranks(batch: Batch, problem: Problem) -> Assignment:
    """Every sequence in a wave of its own."""
    n, ranks = len(batch.rows), problem.num_ranks
    return Assignment(
        wave=np.arange(n, dtype=np.int32),
        rank_offsets=offsets_of([ranks] * n),
        ranks=np.tile(np.arange(ranks, dtype=np.int32), n),
        member_offsets=offsets_of([1] * n),
        members=np.arange(n),
    )


def again(found: Assignment, batch: Batch, problem: Problem) -> Assignment | None:
    order, sequences = by_falling_work(batch.work)
    return regrouped(found, order, sequences, planner_inputs(problem))


@pytest.mark.boundscheck
@settings(max_examples=30)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 3_000), st.integers(3_000, 60_000)), min_size=1, max_size=60),
    shape=st.sampled_from([(1, 1), (2, 2), (8, 8), (12, 4), (16, 8), (10, 8)]),
    padding=st.sampled_from([None, 64]),
    starts_bad=st.booleans(),
)
def test_waves_planned_again_hold_every_sequence_once_and_never_end_later(
    lengths: list[int], shape: tuple[int, int], padding: int | None, starts_bad: bool
) -> None:
    ranks, per_node = shape
    fit = [min(length, ranks * 8192) for length in lengths]
    problem = example_problem(
        "microbatch", num_ranks=ranks, ranks_per_node=per_node, tokens_per_rank=8192, padding_multiple=padding
    )
    batch = batch_of(table_of(fit), problem)
    order, sequences = by_falling_work(batch.work)
    found = assign_waves(order, sequences, planner_inputs(problem))
    if starts_bad or found is None:
        found = alone_on_all_ranks(batch, problem)
    other = again(found, batch, problem)
    if other is None:
        return
    check_assignment(other, batch, problem)
    assert makespan_seconds(other, batch, problem) < makespan_seconds(found, batch, problem)


def test_two_waves_become_one_if_their_sequences_fit_side_by_side() -> None:
    problem = example_problem("microbatch", num_ranks=2, ranks_per_node=2, tokens_per_rank=8192)
    batch = batch_of(table_of([5000, 5000]), problem)
    together = again(alone_on_all_ranks(batch, problem), batch, problem)
    assert together is not None
    assert together.wave.max() == 0
    assert sorted(together.ranks) == [0, 1]


def test_the_best_step_is_left_as_it_is() -> None:
    problem = example_problem("microbatch", num_ranks=2, ranks_per_node=2, tokens_per_rank=8192)
    batch = batch_of(table_of([8000, 8000, 4000, 4000]), problem)
    order, sequences = by_falling_work(batch.work)
    found = assign_waves(order, sequences, planner_inputs(problem))
    assert found is not None
    assert again(found, batch, problem) is None


def test_long_sequences_share_the_ranks_of_a_node_where_rings_of_their_own_leave_no_room() -> None:
    # A ring of two ranks holds one of them, a group of eight five.
    problem = example_problem("microbatch", num_ranks=8, ranks_per_node=8, tokens_per_rank=8192)
    dear = replace(problem.profile.coefficients, microbatch_seconds=5.0)
    problem = replace(problem, profile=replace(problem.profile, coefficients=dear))
    batch = batch_of(table_of([13_000] * 15), problem)
    order, sequences = by_falling_work(batch.work)
    found = assign_waves(order, sequences, planner_inputs(problem))
    assert found is not None
    assert max(sizes_of(found.member_offsets)[sizes_of(found.rank_offsets) > 2]) > 1


def test_more_patience_never_makes_the_step_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = example_problem("microbatch", num_ranks=8, ranks_per_node=8, tokens_per_rank=8192)
    batch = batch_of(table_of([30_000, 21_000, 20_000, 12_000, 11_000, 9_000, 7_000, 6_000, 5_000, 4_000]), problem)
    found = alone_on_all_ranks(batch, problem)
    seconds = [makespan_seconds(found, batch, problem)]
    for patience in range(1, 12):
        monkeypatch.setattr(searches, "_PATIENCE", patience)
        seconds.append(makespan_seconds(again(found, batch, problem) or found, batch, problem))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[1] < seconds[0]
