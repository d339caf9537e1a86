"""Plans whose groups split heads: the strategies of others, and fcp's choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fcp_cli.cost.model import sequence_work
from fcp_cli.cost.profile import Heads, dump_cost_profile
from fcp_cli.cost.recipe import SplitAttention
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.pricing import PlacedPacks, microbatch_prices, quickest_heads
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.compare import compare
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.solvers import make_solver, works_under
from tests.planning.examples import example_problem, one_batch, table_of

HEADS = Heads(
    query_heads=8, key_value_heads=2, exchange_bytes_per_token=600_000, key_value_exchange_bytes_per_token=150_000
)
LENGTHS = [60_000, 50_000, 30_000, *range(500, 8_000, 500)]


def problem_with(attention: SplitAttention | None, heads: Heads | None = HEADS) -> Problem:
    """16 ranks in nodes of 4, whose rings across nodes are slow and exposed."""
    problem = example_problem("microbatch", tokens_per_rank=8192)
    coefficients = replace(problem.profile.coefficients, ring_bytes_per_token=4e6, chunk_seconds_per_token=1e-5)
    profile = replace(problem.profile, coefficients=coefficients, heads=heads)
    return replace(problem, attention=attention, profile=replace(profile, text=dump_cost_profile(profile)))


def planned(name: str, problem: Problem, lengths: list[int] = LENGTHS) -> StepPlan:
    batches = one_batch(lengths, problem)
    batch = batches.batch(0)
    return assemble(make_solver(name, batches).assign(batch), batch, problem)


def test_ulysses_has_one_degree_whose_ranks_all_share_heads() -> None:
    step = planned("deepspeed-ulysses", problem_with("ulysses"))
    working = ~step.is_idle
    assert step.heads_degree is not None
    assert set(step.degrees[working]) == set(step.heads_degree[working]) == {8}


def test_usp_has_one_u_and_one_r() -> None:
    step = planned("usp", problem_with("2d"))
    working = ~step.is_idle
    assert step.heads_degree is not None
    assert len(set(zip(step.degrees[working], step.heads_degree[working], strict=True))) == 1
    assert 1 < step.heads_degree.max() <= 4


def test_fcp_chooses_u_and_r_by_pack_and_beats_rings_and_fixed_splits() -> None:
    ours, rings = planned("fcp", problem_with("2d")), planned("fcp", problem_with(None))
    assert ours.heads_degree is not None and rings.heads_degree is None
    assert len(np.unique(ours.heads_degree)) > 1
    assert ours.makespan_seconds < rings.makespan_seconds
    assert ours.makespan_seconds <= planned("usp", problem_with("2d")).makespan_seconds
    assert ours.bound_seconds <= ours.makespan_seconds


def test_rings_alone_are_planned_as_under_a_profile_without_heads() -> None:
    with_heads, without = planned("fcp", problem_with(None)), planned("fcp", problem_with(None, heads=None))
    assert with_heads.makespan_seconds == without.makespan_seconds
    assert with_heads.ranks.tolist() == without.ranks.tolist()


@pytest.mark.parametrize("attention", ["2d", "ulysses"])
def test_a_plan_that_splits_heads_keeps_every_rule(tmp_path: Path, attention: SplitAttention) -> None:
    settings = BatchSettings(global_batch_size=9)
    inputs = PlanInputs(table=table_of(LENGTHS), problem=problem_with(attention), settings=settings)
    make_plan(tmp_path / "plan.parquet", inputs)
    assert list(check_plan(tmp_path / "plan.parquet", manifest=table_of(LENGTHS))) == []
    assert PlanReader(tmp_path / "plan.parquet").metadata.attention == attention


def test_ulysses_refuses_sequences_that_its_heads_ranks_cannot_hold() -> None:
    with pytest.raises(UsageError, match="shares 8 query heads among 8 ranks at most, which hold 65536 tokens"):
        planned("fcp", problem_with("ulysses"), [70_000, 100])


def test_strategies_that_split_heads_need_to_be_asked_for_it() -> None:
    with pytest.raises(UsageError, match="--solver usp splits heads; add --attention 2d"):
        planned("usp", problem_with("ulysses"))
    with pytest.raises(UsageError, match="needs a cost profile with the block heads"):
        planned("usp", problem_with(None, heads=None))


def test_a_comparison_has_them_where_the_profile_prices_them() -> None:
    for name in ("usp", "deepspeed-ulysses"):
        assert works_under(name, problem_with(None).profile)
        assert not works_under(name, problem_with(None, heads=None).profile)
    settings = BatchSettings(global_batch_size=len(LENGTHS), shuffle=False)
    names = ["fcp", "deepspeed-ulysses", "usp"]
    found = list(compare(table_of(LENGTHS), problem_with(None), settings, names=names, milp_seconds=1.0))
    assert [one.refusal for one in found] == ["", "", ""]
    assert found[0].best is not None and found[2].best is not None


@pytest.mark.parametrize("attention", ["ulysses", "2d"])
def test_groups_are_priced_as_with_the_heads_degrees_that_they_then_get(attention: SplitAttention) -> None:
    degrees = [1, 2, 4, 8, 1] if attention == "ulysses" else [1, 3, 4, 6, 2]
    profile = problem_with(attention).profile
    rows = LengthTable(name="rows", length_tokens=np.array([500, 3_000, 9_000, 40_000, 7_000, 100, 2_000]))
    problem = replace(problem_with(attention), ranks_per_node=4)
    packs = PlacedPacks(
        work=sequence_work(rows, profile),
        offsets=np.array([0, 1, 2, 4, 6, 7]),
        rank_offsets=np.cumsum([0, *degrees]),
        ranks=np.arange(16, dtype=np.int32),
    )
    heads = quickest_heads(attention, packs, problem, profile)
    assert heads.max() > 1
    together = microbatch_prices(packs, problem, profile, heads=attention)
    apart = microbatch_prices(packs, problem, profile, heads=heads)
    assert together.seconds.tolist() == apart.seconds.tolist()
