"""The recipe in which other ranks continue a run, and how a plan's recipe is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inline_snapshot import snapshot

from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.planning.continuation import continued_recipe
from fcp_cli.planning.options import PlanRequest
from fcp_cli.report.profiles import memory_sentence, planned_memory
from fcp_cli.util.console import Assumptions
from tests.launching.jobs import plan_metadata
from tests.messages import raises

PLANNED = plan_metadata(sync="microbatch", recipe=Recipe(zero_stage=3, recompute="selective", shard_ranks=8))


def continued(ranks: int, assumptions: Assumptions, metadata: PlanMetadata = PLANNED, **asked: Any) -> Recipe | None:
    request = PlanRequest(recipe=RecipeRequest(**asked))
    profile = parse_cost_profile(metadata.cost_profile, name="profile")
    return continued_recipe(request, metadata, profile, JobRanks(num_ranks=ranks, ranks_per_node=8), assumptions)


def test_a_run_continues_in_its_recipe_but_for_what_was_asked_for() -> None:
    assert continued(24, Assumptions()) == PLANNED.recipe
    found = continued(24, Assumptions(), zero="1", recompute="full")
    assert (found and found.zero_stage, found and found.recompute) == (1, "full")


def test_ranks_that_cannot_share_copies_out_as_before_share_one() -> None:
    assumptions = Assumptions()
    found = continued(12, assumptions)
    assert found is not None and found.shard_ranks is None
    assert assumptions.assumed["--shard-ranks"] == "all (8 do not divide 12 ranks)"
    with raises(snapshot("UsageError: --shard-ranks is 5; it must divide the 12 ranks")):
        continued(12, Assumptions(), shard_ranks=5)


def test_fewer_ranks_that_hold_fewer_tokens_are_warned_of() -> None:
    assumptions = Assumptions()
    continued(2, assumptions, replace(PLANNED, tokens_per_rank=30_000))
    (warning,) = assumptions.warnings
    assert warning.startswith("--tokens-per-rank is 30,000, but a rank holds 0: the model takes")


def test_a_plan_without_a_recipe_has_none_to_change() -> None:
    without = plan_metadata()
    assert continued(8, Assumptions(), without) is None
    with raises(snapshot("UsageError: the run's plan records no recipe; give --zero to 'fcp launch --resume' instead")):
        continued(8, Assumptions(), without, zero="2")


def test_the_report_says_what_the_budget_takes() -> None:
    memory = planned_memory(PLANNED, peers=4)
    assert memory is not None
    sentence = memory_sentence(PLANNED, memory)
    assert sentence.startswith("By the memory model of qwen3-8b, a rank at its full token budget takes ")
    assert "GB under ZeRO-3, bf16, selective recomputation, chunked loss, sharded over 8 ranks: " in sentence
    assert planned_memory(plan_metadata(), peers=4) is None


def test_stage_3_needs_waves_when_a_run_continues_too() -> None:
    with raises(
        snapshot(
            "UsageError: --zero 3 gathers weights in every micro-batch, of which ranks run different numbers under sync iteration; give --zero 2, or plan with 'fcp plan --sync microbatch'"
        )
    ):
        continued(8, Assumptions(), plan_metadata(recipe=Recipe(zero_stage=2)), zero="3")
