"""What `fcp plan` and `fcp compare` say at the end: whether a plan pays, and what would help more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.cost.recipe import RecipeRequest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.compare import Contender, Outcome
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import PlanInputs, resolve
from fcp_cli.planning.verdict import (
    Remedy,
    Rival,
    Verdict,
    best_remedy,
    compared_verdict,
    enough_ranks,
    given_profile,
    problem_under,
)
from fcp_cli.report.verdict import verdict_lines
from fcp_cli.util.console import Assumptions
from tests.planning.examples import compile_planner, example_problem, long_tail

STATIC = Rival(name="static", label="static degree 8", factor=1.35, steps=25)
MEGATRON = Rival(name="megatron-dynamic-cp", label="Megatron's dynamic CP", factor=1.5, steps=8)
REMEDY = Remedy(
    flags="--recompute none --sync microbatch --tokens-per-rank 9249", factor=0.78, tokens_per_rank=9249, steps=8
)
VERDICT = Verdict(solver="fcp", steps=25, device_hours=1620.0, rivals=(STATIC, MEGATRON))


def test_a_plan_that_pays_says_what_it_saves_in_hours_and_money() -> None:
    verdict = replace(VERDICT, device_hour_price=2.5, remedy=replace(REMEDY, flags="--recompute none"), tried=3)
    assert verdict_lines(verdict) == [
        "Worth it: fcp takes 26% less time than static degree 8.",
        "Device-hours an epoch: fcp 1,620, static degree 8 2,187, Megatron's dynamic CP",
        "2,430 (on 8 steps); 1,418 saved at 2.5 each.",
        "What helps more: --recompute none (9,249 tokens a rank): 22% less.",
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


def outcome(seconds: float, over_budget: int = 0) -> dict[Sync, Outcome]:
    return {
        "iteration": Outcome(
            sync="iteration", options={}, step_seconds=seconds, gap=0.0, idle_fraction=0.0, distinct_groups=0,
            over_budget=over_budget, setup_seconds=0.0, planning_seconds=0.0,
        )
    }  # fmt: skip


def test_a_comparison_is_judged_against_the_best_row_that_fits(tmp_path: Path) -> None:
    inputs = inputs_of(tmp_path, sync="iteration")
    contenders = [
        Contender(name="fcp", outcomes=outcome(1.0)),
        Contender(name="static", outcomes=outcome(1.3)),
        Contender(name="karmarkar-karp", outcomes=outcome(1.11)),
        Contender(name="bytescale", outcomes=outcome(0.9, over_budget=3)),
    ]
    batches = GlobalBatches(inputs.table, inputs.problem, replace(inputs.settings, global_batch_size=4000))
    verdict = compared_verdict(contenders, inputs, batches)
    assert verdict is not None
    assert [one.name for one in verdict.rivals] == ["static", "karmarkar-karp"]
    assert verdict_lines(verdict)[0] == "Worth it: fcp takes 10% less time than karmarkar-karp."
    assert compared_verdict(contenders[:1], inputs, batches) is None


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
