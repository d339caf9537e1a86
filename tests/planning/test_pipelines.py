"""Plans of pipelines: their times are the exact timeline, their bound is proven, and what cannot run is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from fcp_cli.cost.levels import RecomputeLevel, seconds_by_stage, whole_layers
from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.errors import PlanError
from fcp_cli.memory.fitting import JobRanks, all_fits
from fcp_cli.models.model import load_model
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning.assemble import StuckError, assemble, assignment_seconds, makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.groups import reordered, wave_orders
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.recipe import RecipeData, sampled_seconds
from fcp_cli.planning.settings import PlanInputs, resolve_problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.console import Assumptions
from tests.plan.plans import rewritten
from tests.planning.examples import example_problem, first_step, long_tail, one_batch, table_of

PIPELINE = Pipeline(forward_share=1 / 3, head_share=0.08, send_seconds_per_token=1e-6)
STAGED = replace(PIPELINE, recompute_seconds_per_token=(8e-5, 4e-5, 1e-5, 0.0))


def pipelined(sync: Sync = "iteration", *, stages: int = 4, virtual_stages: int = 1, ranks: int = 16) -> Problem:
    return replace(
        example_problem(sync, num_ranks=ranks, tokens_per_rank=8192),
        pipeline_parallel=stages,
        pipeline=replace(PIPELINE, virtual_stages=virtual_stages),
    )


def planned(path: Path, problem: Problem, solver: str = "fcp") -> Path:
    inputs = PlanInputs(
        table=long_tail(60),
        problem=problem,
        settings=BatchSettings(global_batch_size=63, shuffle=False),
        request=PlanRequest(solver=solver),
    )
    make_plan(path, inputs)
    return path


def alone(lengths: list[int], problem: Problem) -> Batch:
    return one_batch(lengths, problem).batch(0)


def assignment(groups: list[list[int]], members: list[list[int]]) -> Assignment:
    return Assignment(
        wave=np.full(len(groups), -1, dtype=np.int32),
        rank_offsets=np.cumsum([0, *map(len, groups)]),
        ranks=np.array([rank for group in groups for rank in group], dtype=np.int32),
        member_offsets=np.cumsum([0, *map(len, members)]),
        members=np.array([k for pack in members for k in pack]),
    )


@pytest.mark.parametrize(("sync", "virtual_stages"), [("iteration", 1), ("microbatch", 1), ("microbatch", 2)])
def test_a_plan_of_pipelines_is_sound(tmp_path: Path, sync: Sync, virtual_stages: int) -> None:
    plan = planned(tmp_path / "plan.parquet", pipelined(sync, virtual_stages=virtual_stages))
    assert list(check_plan(plan, manifest=long_tail(60))) == []
    metadata = PlanReader(plan).metadata
    assert metadata.pipeline is not None and metadata.pipeline.virtual_stages == virtual_stages
    step = next(PlanReader(plan).steps())
    assert step.bound_seconds < step.makespan_seconds
    if virtual_stages == 2:  # Megatron interleaves whole rounds alone
        assert (step.wave.max() + 1) % 4 == 0


def test_the_mean_device_of_a_replica_computes_the_seconds_of_its_micro_batches() -> None:
    """What the profile says of a micro-batch stays what its replica computes, whichever stage has loss and encoder."""
    problem = pipelined(ranks=1)
    batch = alone([4096, 512], problem)
    step = assemble(assignment([[0], [0]], [[0], [1]]), batch, problem)
    assert problem.pipeline is not None
    plain = assemble(assignment([[0], [0]], [[0], [1]]), batch, replace(problem, pipeline=None))
    assert step.seconds.tolist() == plain.seconds.tolist()
    assert step.makespan_seconds > plain.makespan_seconds + 3 * step.seconds.min()


def test_one_micro_batch_takes_its_seconds_once_on_every_stage() -> None:
    problem = pipelined(ranks=1)
    batch = alone([4096], problem)
    step = assemble(assignment([[0]], [[0]]), batch, problem)
    messages = 2 * 3 * 4096e-6
    assert step.makespan_seconds == pytest.approx(4 * float(step.seconds[0]) + messages)
    assert step.bound_seconds == pytest.approx(4 * float(step.seconds[0]), rel=1e-9)  # the optimum, but for messages


def test_stages_that_recompute_more_take_longer_and_a_micro_batch_as_long_as_before() -> None:
    problem = replace(pipelined(ranks=1), pipeline=STAGED)
    batch = alone([4096], problem)
    one = assemble(assignment([[0]], [[0]]), batch, problem)
    assert one.makespan_seconds == pytest.approx(4 * float(one.seconds[0]) + 2 * 3 * 4096e-6)
    assert one.bound_seconds == pytest.approx(4 * float(one.seconds[0]), rel=1e-9)
    many = alone([4096] * 120, problem)
    rows = assignment([[0]] * 120, [[number] for number in range(120)])
    slowest, alike = (
        makespan_seconds(rows, many, replace(problem, pipeline=pipeline))
        for pipeline in (replace(STAGED, head_share=0.0), replace(PIPELINE, head_share=0.0))
    )
    assert slowest > alike + 110 * 4096 * (8e-5 - 3.25e-5)  # the first stage is the slowest, by what it recomputes
    headless = replace(problem, pipeline=replace(STAGED, head_share=0.0))
    assert 0.85 * slowest < lower_bound_seconds(many.work, headless) <= slowest


def test_what_stages_recompute_is_in_plans_that_know_it_alone(tmp_path: Path) -> None:
    plain = PlanReader(planned(tmp_path / "plain.parquet", pipelined())).metadata
    assert "recompute_seconds_per_token" not in plain.to_json()  # nor in the hash of earlier plans
    path = planned(tmp_path / "staged.parquet", replace(pipelined(), pipeline=STAGED))
    assert list(check_plan(path, manifest=long_tail(60))) == []
    assert PlanReader(path).metadata.pipeline == STAGED
    wrong = rewritten(path, pipeline=replace(STAGED, recompute_seconds_per_token=(1e-5, 0.0)))
    with pytest.raises(PlanError, match="damaged: pipeline: 2 times of recomputation for 4 stages"):
        PlanReader(wrong)


@pytest.mark.parametrize("stages", [2, 4])
def test_each_stage_recomputes_as_little_as_its_memory_needs(stages: int) -> None:
    """At every token budget that is tried, whole layers fit, and one layer fewer would not."""
    spec, layers = load_model("qwen3-8b"), 36 // stages
    place = JobRanks(num_ranks=8, ranks_per_node=8, pipeline_parallel=stages, capacity_bytes=73.6e9)
    fits = all_fits(spec, RecipeRequest(recompute="as-needed", zero="1"), place)
    assert len({fit.tokens for fit in fits}) == 5
    for fit in fits:
        levels = tuple(
            RecomputeLevel(recompute=kind, tokens=tokens, seconds_per_token=float(kind == "selective"))
            for kind, tokens in fit.level_tokens.items()
        )
        memory = {kind: place.memory(spec, replace(fit.recipe, recompute=kind), fit.sync) for kind in fit.level_tokens}
        kept = {kind: found.kept_bytes_per_token for kind, found in memory.items()}
        other = memory["selective"].total_bytes(fit.tokens) - kept["selective"] * fit.tokens
        held = [fit.tokens * (stages - stage) / stages for stage in range(stages)]
        shares = seconds_by_stage(levels, held)
        assert (list(shares) == sorted(shares, reverse=True) and shares[0] > shares[-1]) or fit.tokens == fits[0].tokens
        for tokens, share in zip(held, shares, strict=True):
            count = whole_layers(share, layers)
            per_layer = (kept["none"] - kept["selective"]) * tokens / layers  # that recomputing one frees
            total = other + kept["none"] * tokens - count * per_layer
            assert total <= place.capacity_bytes * 1.001
            assert count == 0 or total + per_layer > place.capacity_bytes * 0.999


@pytest.mark.lengthy
def test_pipelines_that_recompute_as_needed_are_quicker_than_with_one_kind() -> None:
    table = table_of(long_tail(120).length_tokens[:120].tolist())  # without those that take rings of many
    data = RecipeData(table=table, settings=BatchSettings(global_batch_size=120))

    def found(recompute: Literal["as-needed", "none", "selective"]) -> tuple[Problem, float, Assumptions]:
        recipe = RecipeRequest(recompute=recompute, zero="1")
        request = PlanRequest(
            model="qwen3-8b",
            cluster="ascend910b-8x8",
            ranks=4,
            pipeline_parallel=4,
            virtual_stages=1,  # as-needed recomputation has no others
            recipe=recipe,
            sync="microbatch",
        )
        problem, _budget = resolve_problem(request, assumptions := Assumptions(), data=data)
        return problem, sampled_seconds(problem, data.sample(problem)), assumptions

    problem, seconds, assumptions = found("as-needed")
    assert seconds < min(found("none")[1], found("selective")[1])
    assert problem.pipeline is not None and len(problem.pipeline.recompute_seconds_per_token) == 4
    assert "of the layers of each stage" in assumptions.assumed["recomputation"]
    assert not problem.profile.priced_levels  # it is in the profile's linear seconds, as the mean of the stages


def test_a_changed_time_and_a_circle_are_found(tmp_path: Path) -> None:
    plan = planned(tmp_path / "plan.parquet", pipelined())
    found = [str(finding) for finding in check_plan(rewritten(plan, pipeline=replace(PIPELINE, forward_share=0.5)))]
    assert any("starts at" in finding for finding in found)
    odd = rewritten(plan, pipeline=replace(PIPELINE, virtual_stages=2))
    assert "virtual_stages is 2, which needs sync microbatch, but sync is iteration" in map(str, check_plan(odd))


def test_rings_that_wait_for_each_other_are_refused_under_iteration_and_run_in_waves() -> None:
    """Rank 1 runs a micro-batch between two rings, rank 0 nothing."""
    problem = pipelined(stages=2, ranks=2)
    batch = alone([9000, 100, 9000], problem)
    circle = assignment([[0, 1], [1], [0, 1]], [[0], [1], [2]])
    assert makespan_seconds(circle, batch, problem) == np.inf
    with pytest.raises(StuckError, match="step 0: the pipelines of 3 micro-batches would wait for each other in a cir"):
        assemble(circle, batch, problem)
    waves = replace(circle, wave=np.array([0, 1, 2], dtype=np.int32))
    assert np.isfinite(assemble(waves, batch, replace(problem, sync="microbatch")).makespan_seconds)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_the_planner_for_pipelines_is_quicker_than_waves_and_than_the_others(stages: int, sync: Sync) -> None:
    problem = pipelined(sync, stages=stages)
    batches = GlobalBatches(long_tail(120), problem, BatchSettings(global_batch_size=123, shuffle=False))
    batch = batches.batch(0)

    def seconds(name: str, plain: bool) -> float:
        its = GlobalBatches(batches.table, replace(problem, pipeline=None) if plain else problem, batches.settings)
        return makespan_seconds(make_solver(name, its).assign(batch), batch, problem)

    ours = seconds("fcp", plain=False)
    assert ours <= seconds("fcp", plain=True)
    assert ours < min(seconds(name, plain=False) for name in ("fcp-paper", "static", "bytescale"))


def test_the_bound_holds_for_every_order_and_group_of_a_small_step() -> None:
    """Two ranks, three sequences: all groups and orders, under both schedules."""
    from itertools import permutations, product

    for virtual_stages, pipeline in ((1, PIPELINE), (1, STAGED), (2, PIPELINE)):
        sync: Sync = "microbatch" if virtual_stages == 2 else "iteration"
        problem = pipelined(sync, ranks=2, virtual_stages=virtual_stages)
        problem = replace(problem, pipeline=replace(pipeline, virtual_stages=virtual_stages))
        batch = alone([6000, 3000, 500], problem)
        best = np.inf
        for groups in product(([0], [1], [0, 1]), repeat=3):
            for order in permutations(range(3)):
                found = assignment([groups[k] for k in order], [[k] for k in order])
                if virtual_stages == 2:
                    found = replace(found, wave=np.arange(3, dtype=np.int32))
                best = min(best, makespan_seconds(found, batch, problem))
        step = first_step(one_batch([6000, 3000, 500], problem))
        assert step.bound_seconds <= best
        assert step.makespan_seconds <= 1.1 * best


@pytest.mark.lengthy
def test_beside_one_long_sequence_no_published_strategy_is_quicker() -> None:
    """Half of the ranks may wait for it with little else to do: `megatron-dynamic-cp` was quicker here, at P = 8."""
    rng = np.random.default_rng(0)
    lengths = [65_536, *rng.integers(2048, 8193, 127).tolist()]
    for stages, virtual_stages in ((8, 1), (4, 2)):
        sync: Sync = "microbatch" if virtual_stages > 1 else "iteration"
        problem = pipelined(sync, stages=stages, virtual_stages=virtual_stages)
        batches = GlobalBatches(table_of(lengths), problem, BatchSettings(global_batch_size=len(lengths)))
        batch = batches.batch(0)
        taken = {
            name: makespan_seconds(make_solver(name, batches).assign(batch), batch, problem)
            for name in ("fcp", "fcp-paper", "bytescale", "megatron-dynamic-cp")
        }
        assert min(taken, key=taken.__getitem__) == "fcp", taken


def test_the_bound_knows_what_runs_before_and_behind_the_longest_sequence() -> None:
    problem = pipelined(stages=8, ranks=2)
    long, short = [16_384], [2048] * 12
    alone_seconds = lower_bound_seconds(alone(long, problem).work, problem)
    together = lower_bound_seconds(alone(long + short, problem).work, problem)
    step = first_step(one_batch(long + short, problem))
    assert 1.02 * alone_seconds < together <= step.makespan_seconds < 1.1 * together


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_other_orders_of_waves_keep_micro_batches_on_their_ranks_and_never_wait_in_a_circle(sync: Sync) -> None:
    problem = pipelined(sync)
    batch = alone([30_000, 20_000, 9000, *range(500, 2048, 30)], problem)
    plain = replace(problem, pipeline=None, sync="microbatch", tokens_per_rank=2048)
    batches = GlobalBatches(table_of(batch.lengths.tolist()), plain, BatchSettings(global_batch_size=len(batch.rows)))
    waves = make_solver("fcp", batches).assign(batch)

    def microbatches(of: Assignment) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        ranks, members = np.split(of.ranks, of.rank_offsets[1:-1]), np.split(of.members, of.member_offsets[1:-1])
        return {(tuple(r.tolist()), tuple(sorted(m.tolist()))) for r, m in zip(ranks, members, strict=True)}

    orders = [reordered(waves, place) for place in wave_orders(waves, assignment_seconds(waves, batch, plain), problem)]
    assert len(orders) > 3
    for order in orders:
        assert microbatches(order) == microbatches(waves)
        answer = order if sync == "microbatch" else replace(order, wave=np.full_like(order.wave, -1))
        assert np.isfinite(makespan_seconds(answer, batch, problem))
