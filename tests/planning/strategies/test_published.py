"""What must hold for every published strategy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.errors import PlanError
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.solvers import SolverFactory
from fcp_cli.planning.strategies import (
    bytescale,
    fcp_paper,
    flexsp,
    hydraulis,
    karmarkar_karp,
    megatron_dynamic_cp,
    megatron_packing,
    row_packing,
)
from tests.planning.examples import example_problem, first_step, long_tail, one_batch

FACTORIES: dict[str, SolverFactory] = {
    "bytescale": bytescale.make_solver,
    "fcp-paper": fcp_paper.make_solver,
    "flexsp": partial(flexsp.make_solver, milp_seconds=0.05, trials=1),
    "hydraulis": hydraulis.make_solver,
    "karmarkar-karp": karmarkar_karp.make_solver,
    "megatron-dynamic-cp": megatron_dynamic_cp.make_solver,
    "megatron-packing": megatron_packing.make_solver,
    "megatron-any-degree": megatron_packing.make_any_degree,
    "packing": row_packing.make_solver,
}
NAMES = list(FACTORIES)


@pytest.mark.lengthy
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(st.lists(st.integers(1, 8 * 1000), min_size=1, max_size=25))
def test_a_step_is_whole_within_budget_and_not_below_the_bound(name: str, sync: Sync, lengths: list[int]) -> None:
    batches = one_batch(lengths, example_problem(sync, num_ranks=8, ranks_per_node=4, tokens_per_rank=1000))
    # Assembling checks coverage, budget, ranks and waves.
    step = first_step(batches, FACTORIES[name])
    assert step.makespan_seconds >= step.bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "flexsp"])
def test_the_same_batch_gives_the_same_answer(name: str) -> None:
    batches = GlobalBatches(long_tail(), example_problem(), BatchSettings(global_batch_size=203))
    first, second = (FACTORIES[name](batches).assign(batches.batch(0)) for _ in range(2))
    np.testing.assert_array_equal(first.ranks, second.ranks)
    np.testing.assert_array_equal(first.members, second.members)


@pytest.mark.parametrize("name", ["flexsp", "hydraulis", "megatron-dynamic-cp", "megatron-packing"])
def test_powers_of_two_cannot_hold_what_six_ranks_can(name: str) -> None:
    batches = one_batch([5500, 10], example_problem(num_ranks=6, ranks_per_node=6, tokens_per_rank=1000))
    with pytest.raises(PlanError, match=f"{name} cannot plan a sequence of 5500 tokens: its degrees are powers of two"):
        FACTORIES[name](batches).assign(batches.batch(0))


@pytest.mark.parametrize("name", ["bytescale", "karmarkar-karp", "megatron-any-degree"])
def test_any_degree_holds_what_six_ranks_can(name: str) -> None:
    step = first_step(
        one_batch([5500, 10], example_problem(num_ranks=6, ranks_per_node=6, tokens_per_rank=1000)), FACTORIES[name]
    )
    assert max(step.degrees) == 6
