from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, spread_steps
from fcp_cli.planning.static import Packing, StaticSolver, make_solver
from tests.planning.examples import example_problem, long_tail, table_of

SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")


def batches_of(sync: Sync, lengths: list[int], size: int = 1000) -> GlobalBatches:
    return GlobalBatches(table_of(lengths), example_problem(sync), BatchSettings(global_batch_size=size))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 4000), st.integers(1, 16 * 16384)), min_size=1, max_size=60),
    sync=st.sampled_from(SYNCS),
    degree=st.sampled_from([1, 2, 4, 8, 16]),
    packing=st.sampled_from(["full", "even"]),
)
def test_any_batch_is_planned_on_aligned_groups_of_one_degree(
    lengths: list[int], sync: Sync, degree: int, packing: Packing
) -> None:
    problem = example_problem(sync)
    lengths = [min(length, degree * problem.tokens_per_rank) for length in lengths]
    batch = batches_of(sync, lengths).batch(0)
    solver = StaticSolver(problem=problem, degree=degree, packing=packing)
    step = assemble(solver.assign(batch), batch, problem)
    for row in step.microbatches():
        if not row.is_idle:
            assert row.degree == degree
            assert row.ranks[0] % degree == 0
            assert row.ranks[-1] - row.ranks[0] == degree - 1


@pytest.mark.parametrize("sync", SYNCS)
def test_the_degree_holds_the_longest_sequence_of_the_whole_plan(sync: Sync) -> None:
    lengths = [100] * 40 + [3 * 16384]
    solver = make_solver(batches_of(sync, lengths, size=8))
    assert solver.options["degree"] in (4, 8, 16)


@pytest.mark.parametrize("sync", SYNCS)
def test_no_other_degree_or_packing_is_faster(sync: Sync) -> None:
    table = long_tail()
    batches = GlobalBatches(table, example_problem(sync), BatchSettings(global_batch_size=60))
    chosen = make_solver(batches)

    def total(solver: StaticSolver) -> float:
        return sum(makespan_seconds(solver.assign(batch), batch, batches.problem) for batch in batches)

    for degree in (8, 16):
        for packing in ("full", "even"):
            other = StaticSolver(problem=batches.problem, degree=degree, packing=packing)
            assert total(chosen) <= total(other)


def test_waves_hold_packs_of_like_cost() -> None:
    batches = batches_of("microbatch", [16_000] * 16 + [9_000] * 16)
    solver = StaticSolver(problem=batches.problem, degree=1)
    batch = batches.batch(0)
    step = assemble(solver.assign(batch), batch, batches.problem)
    working = np.diff(step.sequence_offsets) > 0
    for wave in np.unique(step.wave):
        assert len(set(step.tokens[working & (step.wave == wave)].tolist())) == 1


def test_even_packing_gives_every_group_work_where_full_packing_leaves_some_idle() -> None:
    batches = batches_of("iteration", [1000] * 64)
    batch = batches.batch(0)
    idle = {}
    for packing in ("full", "even"):
        solver = StaticSolver(problem=batches.problem, degree=1, packing=packing)
        step = assemble(solver.assign(batch), batch, batches.problem)
        idle[packing] = int((np.diff(step.sequence_offsets) == 0).sum())
    assert idle == {"full": 12, "even": 0}


def test_a_sample_holds_all_steps_of_a_short_plan_and_evenly_spaced_ones_of_a_long_plan() -> None:
    assert spread_steps(3, 32) == [0, 1, 2]
    assert len(spread_steps(1000, 32)) == 32
    assert set(np.diff(spread_steps(1000, 32)).tolist()) == {31, 32}
