"""What `fcp plan` and `fcp compare` say at the end: whether a plan pays, and what would help more."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.cost.recipe import RecipeRequest, check_recipe
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Baseline, Baselines
from fcp_cli.planning.compare import (
    SYNCS,
    USABLE,
    Contender,
    Outcome,
    compare,
    compare_recipes,
    runnable_problems,
)
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings import PlanInputs, resolve
from fcp_cli.planning.verdict import (
    Remedy,
    Rival,
    Verdict,
    baselines_of,
    best_remedy,
    compared_steps,
    enough_ranks,
    given_profile,
    priced_baselines,
    problem_under,
    rivals_of,
    verdict_on,
)
from fcp_cli.report.verdict import verdict_lines
from fcp_cli.util.console import Assumptions
from tests.planning.examples import compile_planner, example_problem, long_tail

STATIC = Rival(name="static", label="static degree 8", factor=1.35, spread=(1.25, 1.43))
MEGATRON = Rival(name="megatron-dynamic-cp", label="Megatron's dynamic CP", factor=1.5, spread=(1.5, 1.5))
REMEDY = Remedy(
    flags="--recompute none --sync microbatch --tokens-per-rank 9249", factor=0.78, tokens_per_rank=9249, steps=8
)
VERDICT = Verdict(
    solver="fcp", steps=(0, 5, 10, 15), steps_per_epoch=25, device_hours=1620.0, rivals=(STATIC, MEGATRON)
)


def test_a_plan_that_pays_says_what_it_saves_in_hours_and_money() -> None:
    verdict = replace(VERDICT, device_hour_price=2.5, remedy=replace(REMEDY, flags="--recompute none"), tried=3)
    assert verdict_lines(verdict) == [
        "Worth it: fcp takes 26% less time than static degree 8 (20 to 30% on 4 of 25",
        "steps). Device-hours an epoch: fcp 1,620, static degree 8 2,187, Megatron's",
        "dynamic CP 2,430; 1,418 saved at 2.5 each. What helps more: --recompute none",
        "(9,249 tokens a rank): 22% less.",
    ]
    assert verdict.to_json()["saved_device_hours_per_epoch"] == pytest.approx(567.0)
    assert verdict.to_json()["saved_money_per_epoch"] == pytest.approx(1417.5)


@pytest.mark.parametrize(
    ("factor", "line"),
    [
        (1.004, "Not worth it: static degree 8 takes 0.4% more; use it."),
        (0.995, "Not worth it: static degree 8 takes 0.5% less; use it."),
        (1.0, "Not worth it: static degree 8 takes as long; use it."),
        (0.9, "Not worth it: static degree 8 is 10% quicker; use it."),
    ],
)
def test_where_planning_does_not_help_it_names_what_to_use(factor: float, line: str) -> None:
    verdict = replace(VERDICT, rivals=(replace(STATIC, factor=factor), MEGATRON), device_hour_price=2.5, tried=2)
    lines = verdict_lines(verdict)
    assert lines[0] == line
    assert "saved" not in " ".join(lines)
    assert lines[-1] == "No other recomputation, sync or token budget that fits would help."


@pytest.mark.parametrize(
    ("origin", "way"), [("analytic", "plan without it to search others"), ("measured", "fcp profile measures others")]
)
def test_under_a_given_profile_other_recomputation_is_not_said_to_have_been_tried(origin: Any, way: str) -> None:
    lines = verdict_lines(replace(VERDICT, device_hour_price=2.5, tried=2, profile=origin))
    assert " ".join(lines).endswith(f"No other sync or token budget would help; the profile is of this recipe: {way}.")
    assert max(map(len, lines)) <= 80 and len(lines) <= 4


@pytest.mark.parametrize(
    ("static", "line"),
    [
        (1.002, "Not worth it: static degree 8 takes 0.2% more; use it."),
        (1.02, "Not worth it: Megatron's dynamic CP takes 0.1% more; use it if you train with Megatron."),
    ],
)
def test_a_static_grid_that_takes_as_long_is_named_before_megatron(static: float, line: str) -> None:
    rivals = (replace(STATIC, factor=static), replace(MEGATRON, factor=1.001))
    assert " ".join(verdict_lines(replace(VERDICT, rivals=rivals))).startswith(line)


def test_it_never_takes_more_than_four_lines_of_80_columns() -> None:
    remedy = replace(REMEDY, flags="--recompute selective --sync microbatch --tokens-per-rank 129249")
    lines = verdict_lines(replace(VERDICT, device_hours=123_456.0, device_hour_price=12.34, remedy=remedy, tried=3))
    assert len(lines) <= 4 and max(map(len, lines)) <= 80


def test_ranks_that_the_batches_do_not_need_are_named_in_place_of_other_settings() -> None:
    verdict = replace(VERDICT, remedy=REMEDY, num_ranks=64, enough_ranks=8)
    lines = verdict_lines(verdict)
    text = " ".join(lines)
    assert "64 ranks are too many for these batches: 8 ranks with this budget would be as fast." in text
    assert "What helps more" not in text and len(lines) <= 4


def test_a_few_short_sequences_leave_ranks_over_and_a_full_batch_needs_all() -> None:
    compile_planner()
    problem = example_problem(num_ranks=8, ranks_per_node=8, tokens_per_rank=8192)
    few = LengthTable(name="few", length_tokens=np.array([3, 2]))
    assert enough_ranks(problem, [few]) == 1
    many = LengthTable(name="many", length_tokens=np.full(64, 8000))
    assert enough_ranks(problem, [many]) is None
    assert enough_ranks(problem, []) is None


def test_a_verdict_about_an_example_cluster_says_so() -> None:
    lines = " ".join(verdict_lines(replace(VERDICT, num_ranks=64, is_example=True)))
    assert lines.startswith("Worth it on 64 example ranks: fcp takes 26% less time than static degree 8")


def test_only_strategies_that_fit_into_memory_are_baselines() -> None:
    found = baselines_of([contender("static", 1.3), contender("usp", 0.9, over_budget=3)], [0, 2], 10)
    assert found == Baselines(
        steps=(10, 12), strategies=(Baseline(name="static", label="static degree 8", seconds=(1.3, 1.3)),)
    )
    assert baselines_of([contender("usp", 0.9, over_budget=3), Contender(name="packing")], [0], 0) is None


def contender(name: str, seconds: float, over_budget: int = 0) -> Contender:
    outcome = Outcome(
        sync="iteration", options={"degree": 8}, step_seconds=seconds, gap=0.0, idle_fraction=0.0, distinct_groups=0,
        over_budget=over_budget, setup_seconds=0.0, planning_seconds=0.0, seconds=(seconds, seconds),
    )  # fmt: skip
    return Contender(name=name, outcomes={"iteration": outcome})


def test_baselines_are_compared_on_the_steps_that_a_plan_has() -> None:
    static = Baseline(name="static", label="static degree 8", seconds=(3.0, 4.0, 9.0))
    baselines = Baselines(steps=(0, 4, 8), strategies=(static,))
    (rival,) = rivals_of(baselines, {0: 2.0, 1: 7.0, 4: 2.0})
    assert (rival.factor, rival.spread) == (7 / 4, (1.5, 2.0))
    assert rivals_of(baselines, {1: 7.0}) == ()


@pytest.mark.lengthy
def test_plan_and_compare_answer_alike(tmp_path: Path) -> None:
    """To the digit, since both price the same strategies on the same steps under the same recipes."""
    compile_planner()
    inputs = inputs_of(tmp_path, global_batch_size=20)
    steps = compared_steps(inputs.batches())
    baselines = priced_baselines(inputs, "fcp", SYNCS)
    assert baselines is not None
    result = make_plan(tmp_path / "plan.parquet", inputs, baselines=baselines)
    planned = {step.step: step.makespan_seconds for step in PlanReader(tmp_path / "plan.parquet").steps()}
    contenders = list(compare_recipes(inputs, steps, names=["fcp", *USABLE], syncs=SYNCS))
    ours = contenders[0].outcomes[inputs.problem.sync]
    assert baselines_of(contenders[1:], steps, 0) == baselines
    assert ours.seconds == tuple(planned[step] for step in steps)
    assert result.metadata.baselines == PlanReader(tmp_path / "plan.parquet").metadata.baselines == baselines
    assert verdict_on("fcp", planned, baselines, inputs) == verdict_on(
        "fcp", dict(zip(steps, ours.seconds, strict=True)), baselines, inputs
    )


@pytest.mark.lengthy
def test_a_rival_gets_the_recipe_that_suits_it_and_none_that_cannot_run(tmp_path: Path) -> None:
    compile_planner()
    inputs = inputs_of(tmp_path, global_batch_size=20)
    problems = runnable_problems(inputs)
    assert {one.sync for one in problems} == {"iteration", "microbatch"}
    assert {bool(one.profile.recompute_levels) for one in problems} == {True, False}
    for one in problems:
        assert one.recipe is not None
        check_recipe(one.recipe, sync=one.sync)
    name = "megatron-dynamic-cp"
    (found,) = compare_recipes(inputs, [0], names=[name], syncs=SYNCS)
    alone = [_alone(name, one, inputs) for one in problems]
    assert found.best is not None
    assert found.best.step_seconds == min(alone)


def _alone(name: str, problem: Problem, inputs: PlanInputs) -> float:
    settings = replace(inputs.settings, step_limit=1)
    one = compare(inputs.table, problem, settings, names=[name], syncs=[problem.sync], milp_seconds=1.0)
    best = next(one).best
    return math.inf if best is None or best.over_budget else best.step_seconds


def inputs_of(tmp_path: Path, **options: object) -> PlanInputs:
    table = long_tail(60)
    path = tmp_path / "lengths.parquet"
    pq.write_table(pa.table({"length": table.length_tokens}), path)
    common = {"manifest": path, "model": "qwen3-8b", "cluster": "h200-8x8", "global_batch_size": 63}
    request = PlanRequest(**{**common, **options})  # type: ignore[arg-type]
    return resolve(request, Assumptions())


def test_the_verdict_of_a_plan_knows_whether_a_profile_was_given(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path)
    assert given_profile(inputs) is None
    (tmp_path / "profile.yaml").write_text(inputs.problem.profile.text)
    under = replace(inputs.request, model=None, cluster=None, profile=tmp_path / "profile.yaml")
    assert given_profile(resolve(under, Assumptions())) == "analytic"


def sequences_of(inputs: PlanInputs) -> list[LengthTable]:
    return [inputs.table.take(np.arange(len(inputs.table)))]


def typed_flags(flags: str) -> dict[str, Any]:
    """The fields that `--recompute X --sync Y` sets."""
    words = flags.split()
    given = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    recompute: Any = given.pop("recompute", "auto")
    return {"recipe": RecipeRequest(recompute=recompute), **given}


@pytest.mark.lengthy
def test_a_remedy_is_what_the_command_would_give_with_its_flags(tmp_path: Path) -> None:
    compile_planner()
    inputs = inputs_of(tmp_path, recipe=RecipeRequest(recompute="full"))
    remedy, tried = best_remedy(inputs, sequences_of(inputs))
    assert remedy is not None and tried >= 2
    typed = replace(inputs.request, **typed_flags(remedy.flags))
    again = resolve(typed, Assumptions())
    assert again.problem.tokens_per_rank == remedy.tokens_per_rank
    assert problem_under(typed, inputs) == again.problem
    # Nothing is left to gain from what was just followed.
    assert best_remedy(again, sequences_of(again))[0] is None


def test_a_small_token_budget_is_told_how_much_more_fits(tmp_path: Path) -> None:
    compile_planner()
    inputs = inputs_of(tmp_path, tokens_per_rank=2048, recipe=RecipeRequest(recompute="full"))
    remedy, _ = best_remedy(inputs, sequences_of(inputs))
    assert remedy is not None
    assert remedy.flags.endswith(f"--tokens-per-rank {remedy.tokens_per_rank}")
    assert remedy.tokens_per_rank > 2048


def test_nothing_is_claimed_of_batches_that_were_too_large_to_plan_again(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path)
    assert best_remedy(inputs, []) == (None, 0)
