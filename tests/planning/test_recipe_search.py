"""Which recipe a plan gets where the user fixed none: the one whose steps of this data take the least time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.cost.recipe import RecipeRequest, Recompute
from fcp_cli.errors import UsageError
from fcp_cli.memory.fitting import LEAST_TOKENS, FittedRecipe, all_fits
from fcp_cli.models.cluster import load_cluster
from fcp_cli.planning import recipe
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.fcp_solver import solver_of
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.planner import Planner
from fcp_cli.planning.recipe import RecipeCandidate, RecipeChoice, quickest_recipe, sampled_seconds
from fcp_cli.planning.settings import PlanInputs, resolve, resolve_problem
from fcp_cli.planning.verdict import best_remedy, problem_under
from fcp_cli.util.console import Assumptions
from tests.planning.examples import compile_planner, long_tail


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_planner()


def inputs_of(
    folder: Path,
    *,
    lengths: list[int] | None = None,
    assumptions: Assumptions | None = None,
    **options: Any,
) -> PlanInputs:
    path = folder / "lengths.parquet"
    pq.write_table(pa.table({"length": long_tail(40).length_tokens if lengths is None else lengths}), path)
    common = {"manifest": path, "model": "qwen3-8b", "cluster": "h100", "ranks": 16, "global_batch_size": 32}
    request = PlanRequest(**{**common, **options})
    return resolve(request, assumptions or Assumptions())


def candidates_of(inputs: PlanInputs) -> Iterator[RecipeCandidate]:
    """Every recipe that fits, with the problem that a command with its flags would plan."""
    assert inputs.budget is not None and inputs.budget.room is not None and inputs.data is not None
    alone = replace(inputs, data=None)  # nothing is chosen by time
    for fit in all_fits(inputs.budget.room.spec, RecipeRequest(), inputs.budget.room.place):
        recipe, ranks = fit.recipe, inputs.problem.num_ranks
        asked = RecipeRequest(
            zero=str(recipe.zero_stage),  # type: ignore[arg-type]
            shard_ranks=recipe.shards(ranks),
            reduce=recipe.reduce,
            recompute=recipe.recompute,
            offload=recipe.offload,
        )
        yield RecipeCandidate(
            fit=fit,
            problem=problem_under(
                PlanRequest(model="qwen3-8b", sync=fit.sync, recipe=asked, tokens_per_rank=max(1, fit.tokens)), alone
            ),
        )


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> PlanInputs:
    return inputs_of(tmp_path_factory.mktemp("usual"))


@pytest.fixture(scope="module")
def usual_candidates(usual: PlanInputs) -> list[RecipeCandidate]:
    return list(candidates_of(usual))


def chosen(inputs: PlanInputs, candidates: list[RecipeCandidate]) -> RecipeChoice:
    assert inputs.data is not None
    found = quickest_recipe(candidates, usual_of(candidates), inputs.data)
    assert found is not None
    return found


def usual_of(candidates: list[RecipeCandidate]) -> FittedRecipe:
    return next(one.fit for one in candidates if one.fit.tokens >= LEAST_TOKENS)


def usual_seconds(found: RecipeChoice, candidates: list[RecipeCandidate]) -> float:
    """Return the planned seconds of the first recipe of the fixed order, which is planned whatever its bound."""
    usual = usual_of(candidates).key
    return next((seconds for one, seconds in found.others if one.fit.key == usual), found.seconds)


@pytest.mark.lengthy
def test_no_recipe_that_fits_is_quicker_on_the_sampled_steps(
    usual: PlanInputs, usual_candidates: list[RecipeCandidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = usual
    assert inputs.data is not None
    held = [one for one in usual_candidates if inputs.data.fits_into(one.problem)]
    sample = inputs.data.sample(held[0].problem)
    seconds = sorted(sampled_seconds(one.problem, sample) for one in held)
    found = chosen(inputs, usual_candidates)
    assert found.seconds == seconds[0] <= found.others[0][1]
    assert found.seconds <= usual_seconds(found, usual_candidates)
    assert len(found.others) + 1 < found.tried == len(held)  # bounds ruled the others out
    assert (inputs.problem.recipe, inputs.problem.sync, 1) == found.fit.key
    monkeypatch.setattr(recipe, "_MOST_DRAFTED", 5)
    fewer = chosen(inputs, usual_candidates)
    usual_takes = usual_seconds(found, usual_candidates)
    assert len(fewer.others) == 4 and fewer.seconds <= usual_seconds(fewer, usual_candidates) == usual_takes


def test_the_same_data_give_the_same_recipe_however_many_steps_are_planned(tmp_path: Path) -> None:
    first = inputs_of(tmp_path).problem
    assert inputs_of(tmp_path).problem == first
    assert inputs_of(tmp_path, steps=1).problem == first


def test_the_line_of_the_recipe_names_the_second_quickest(tmp_path: Path) -> None:
    assumptions = Assumptions()
    inputs_of(tmp_path, assumptions=assumptions)
    assert re.search(
        r"\(the quickest of \d+ that fit; the second, ZeRO-.*, sync \w+, takes \+\d+\.\d%\)$",
        assumptions.assumed["recipe"],
    )


def test_as_needed_is_quicker_than_any_one_level_and_a_plan_of_it_is_sound(tmp_path: Path) -> None:
    def of(recompute: Recompute) -> PlanInputs:
        return inputs_of(tmp_path, recipe=RecipeRequest(recompute=recompute, zero="3"), sync="microbatch")

    as_needed = of("as-needed")
    sample = [as_needed.batches().batch(step).rows for step in range(2)]
    sequences = [as_needed.table.take(rows) for rows in sample]
    uniform = [
        sampled_seconds(of(kind).problem, sequences) for kind in ("none", "activation", "elementwise", "selective")
    ]
    assert sampled_seconds(as_needed.problem, sequences) < min(uniform)
    levels = as_needed.problem.profile.recompute_levels
    assert levels[-1].tokens == as_needed.problem.tokens_per_rank
    assert as_needed.problem.recipe is not None and as_needed.problem.recipe.recompute == "as-needed"


def test_a_profile_with_levels_gets_those_of_the_ranks_that_it_plans_for(tmp_path: Path) -> None:
    recipe = RecipeRequest(recompute="as-needed", zero="3")
    first = inputs_of(tmp_path, recipe=recipe, sync="microbatch").problem
    profile = tmp_path / "levels.yaml"
    profile.write_text(first.profile.text, encoding="utf-8")
    given: dict[str, Any] = {"model": None, "cluster": None, "profile": profile}
    same, fewer = (inputs_of(tmp_path, ranks=ranks, sync="microbatch", **given).problem for ranks in (16, 8))
    assert same.profile.recompute_levels == first.profile.recompute_levels
    assert fewer.profile.recompute_levels[-1].tokens == fewer.tokens_per_rank < first.tokens_per_rank
    assert fewer.profile.recompute_levels[0].seconds_per_token == 0
    profile.write_text(
        inputs_of(tmp_path, recipe=RecipeRequest(recompute="none")).problem.profile.text, encoding="utf-8"
    )
    with pytest.raises(UsageError, match="has no recompute_levels, by which --recompute as-needed chooses"):
        inputs_of(tmp_path, recipe=RecipeRequest(recompute="as-needed"), **given)


@pytest.mark.parametrize(("gain", "offloads"), [(0.005, False), (0.02, True)])
def test_offloading_must_gain_a_hundredth(
    gain: float,
    offloads: bool,
    usual: PlanInputs,
    usual_candidates: list[RecipeCandidate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = {fit.recipe.offload: fit for fit in (one.fit for one in usual_candidates) if fit.recipe.recompute == "full"}
    pair = [one for one in usual_candidates if one.fit.key in {of[name].key for name in ("none", "activations")}]
    seconds = {"none": 1.0, "activations": 1.0 - gain}
    assert [one.fit.recipe.offload for one in pair] == ["none", "activations"]
    monkeypatch.setattr(recipe, "sampled_seconds", lambda problem, *_, **__: seconds[problem.recipe.offload])
    assert usual.data is not None
    found = quickest_recipe(pair, pair[0].fit, usual.data)
    assert found is not None and (found.fit.recipe.offload == "activations") == offloads
    assert len(found.others) == 1 and found.others[0][0].fit != found.fit


def test_the_quickest_drafts_are_planned_as_the_plan_will_be_before_one_is_chosen(
    usual: PlanInputs, usual_candidates: list[RecipeCandidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three drafts in reverse of their plans, and a fourth that would be quicker still, but is not planned."""
    data = usual.data
    assert data is not None
    fits = [one for one in usual_candidates if one.fit.recipe.offload == "none" and data.fits_into(one.problem)]
    four = fits[:4]
    planned: list[Any] = []

    def seconds_of(problem: Any, *_: Any, is_draft: bool = False, **__: Any) -> float:
        place = next(place for place, one in enumerate(four) if one.problem is problem)
        if is_draft:
            return 1e6 + place
        planned.append(place)
        return 1e6 - place

    monkeypatch.setattr(recipe, "sampled_seconds", seconds_of)
    found = quickest_recipe(four, four[0].fit, data)
    assert found is not None and found.fit == four[2].fit and found.seconds == 1e6 - 2
    assert sorted(planned) == [0, 1, 2]
    assert [seconds for _one, seconds in found.others] == [1e6 - 1, 1e6, 1e6 + 3]


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_a_draft_is_a_whole_step_without_optional_searches(sync: Any, tmp_path: Path) -> None:
    recipe = RecipeRequest(zero="3" if sync == "microbatch" else "2")
    inputs = inputs_of(tmp_path, sync=sync, recipe=recipe, lengths=long_tail(64).length_tokens.tolist())
    solver, batch = solver_of(inputs.problem), inputs.batches().batch(0)
    draft, full = (assemble(assign(batch), batch, inputs.problem) for assign in (solver.draft, solver.assign))
    assert sorted(draft.sequences) == sorted(full.sequences)
    assert full.bound_seconds <= full.makespan_seconds <= draft.makespan_seconds <= 1.1 * full.makespan_seconds


def test_only_settings_that_were_left_open_are_searched(tmp_path: Path) -> None:
    fixed = RecipeRequest(zero="2", recompute="selective", shard_ranks=8)
    inputs = inputs_of(tmp_path, recipe=fixed, sync="iteration")
    recipe = inputs.problem.recipe
    assert recipe is not None and (recipe.zero_stage, recipe.recompute, recipe.shard_ranks) == (2, "selective", 8)
    assert inputs.problem.sync == "iteration"
    assert inputs_of(tmp_path, tokens_per_rank=3000).problem.tokens_per_rank == 3000


def test_a_recipe_that_cannot_hold_the_longest_sequence_is_none(tmp_path: Path) -> None:
    short, long = [4096] * 64, [4096] * 63 + [700_000]
    assert inputs_of(tmp_path, lengths=short).problem.tokens_per_rank * 16 < 700_000
    assert inputs_of(tmp_path, lengths=long).problem.tokens_per_rank * 16 >= 700_000
    one_rank = [4096] * 63 + [60_000]
    assert inputs_of(tmp_path, lengths=one_rank, max_degree=1).problem.tokens_per_rank >= 60_000


def test_gathering_without_a_price_stays_as_the_fixed_order_has_it(tmp_path: Path) -> None:
    assert load_cluster("ascend910b").links_per_node is None
    inputs = inputs_of(tmp_path, cluster="ascend910b")
    usual = usual_of(list(candidates_of(inputs)))
    recipe = inputs.problem.recipe
    assert recipe is not None
    assert (recipe.zero_stage, recipe.shard_ranks, recipe.reduce, inputs.problem.sync) == (
        usual.recipe.zero_stage,
        usual.recipe.shard_ranks,
        usual.recipe.reduce,
        usual.sync,
    )


def test_lengths_that_nobody_knows_yet_leave_room_for_long_ones() -> None:
    planner = Planner(model="qwen3-8b", cluster="h100", ranks=16)
    assert planner.problem.tokens_per_rank >= LEAST_TOKENS
    assert "(the quickest of " in planner.assumed["recipe"]


def test_copies_that_nothing_hides_take_time() -> None:
    """Of a tiny model, whose layers compute for less time than their inputs are under way."""
    there = linear_seconds(RecipeRequest(recompute="full", offload="none"))
    assert linear_seconds(RecipeRequest(recompute="full", offload="activations")) > there


def linear_seconds(recipe: RecipeRequest) -> float:
    request = PlanRequest(model="qwen3-tiny", cluster="h100", ranks=8, recipe=recipe)
    return resolve_problem(request, Assumptions())[0].profile.coefficients.linear_seconds_per_token


def test_a_sample_takes_counted_work(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, lengths=np.full(5000, 600).tolist(), global_batch_size=1000)
    assert inputs.data is not None
    assert [len(step) for step in inputs.data.sample(inputs.problem)] == [1000, 1000]
    wide = replace(inputs.problem, num_ranks=512)
    assert len(inputs.data.sample(wide)) == 1


PIPELINES: dict[str, Any] = {
    "model": "qwen3-8b",
    "cluster": "h100-8x8",
    "ranks": 8,
    "pipeline_parallel": 2,
    "global_batch_size": 64,
    "lengths": [8192] * 64,
}


def stages_of(inputs: PlanInputs) -> int:
    assert inputs.problem.pipeline is not None
    return inputs.problem.pipeline.virtual_stages


def test_virtual_stages_are_chosen_with_the_recipe(tmp_path: Path) -> None:
    assumptions = Assumptions()
    chosen = inputs_of(tmp_path, assumptions=assumptions, **PIPELINES)
    plain = inputs_of(tmp_path, virtual_stages=1, **PIPELINES)
    assert stages_of(chosen) > 1 and chosen.problem.sync == "microbatch"
    assert "--num-virtual-stages-per-pipeline-rank" in assumptions.assumed["--virtual-stages"]
    assert chosen.data is not None
    sample = chosen.data.sample(chosen.problem)
    assert sampled_seconds(chosen.problem, sample) < 0.98 * sampled_seconds(plain.problem, sample)


@pytest.mark.parametrize(
    "asked",
    [
        {"sync": "iteration"},
        {"virtual_stages": 1},
        {"recipe": RecipeRequest(zero="3")},
        {"model": "qwen3-30b-a3b", "pipeline_parallel": 4, "ranks": 16},
    ],
    ids=["sync", "given", "Megatron-FSDP", "experts"],
)
def test_virtual_stages_are_not_chosen_where_the_job_could_not_run_them(tmp_path: Path, asked: dict[str, Any]) -> None:
    assert stages_of(inputs_of(tmp_path, **{**PIPELINES, **asked})) == 1


def test_virtual_stages_are_chosen_under_a_given_profile(tmp_path: Path) -> None:
    chosen = inputs_of(tmp_path, **PIPELINES)
    path = tmp_path / "measured.yaml"
    path.write_text(chosen.problem.profile.text)
    given = {**PIPELINES, "model": None, "cluster": None, "profile": path}
    assert stages_of(inputs_of(tmp_path, **given)) > 1
    assert stages_of(inputs_of(tmp_path, sync="iteration", **given)) == 1


def test_a_shorter_pipeline_on_the_same_devices_is_named_where_it_is_quicker(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, **{**PIPELINES, "pipeline_parallel": 4, "lengths": [8192] * 16})
    assert inputs.data is not None
    sample = inputs.data.sample(inputs.problem)
    remedy, _tried = best_remedy(inputs, [*sample, *sample])
    assert remedy is not None
    assert remedy.steps == 1  # planning for pipelines takes long
    words = remedy.flags.split()
    asked = {"pipeline_parallel": int(words[1]), "ranks": int(words[3])}
    assert words[::2] == ["--pipeline-parallel", "--ranks"]
    assert asked["pipeline_parallel"] * asked["ranks"] == 32  # the devices of the plan
    planned = inputs_of(tmp_path, **{**PIPELINES, "lengths": [8192] * 16, **asked})
    taken = sampled_seconds(planned.problem, sample) / sampled_seconds(inputs.problem, sample)
    assert taken == remedy.factor < 0.98
