from __future__ import annotations

from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Recipe, RecipeRequest, check_recipe, default_recipe
from fcp_cli.errors import UsageError
from tests.messages import raises


@pytest.mark.parametrize(
    ("sync", "device", "stage", "precision"),
    [("iteration", "cpu", 0, "fp32"), ("iteration", "cuda", 2, "bf16"), ("microbatch", "npu", 3, "bf16")],
)
def test_a_job_shards_by_sync_and_device_where_nothing_was_said(
    sync: str, device: str, stage: int, precision: str
) -> None:
    recipe = default_recipe(sync=sync, device=device)
    assert (recipe.zero_stage, recipe.precision) == (stage, precision)


@pytest.mark.parametrize(
    ("request_", "changed"),
    [
        ({}, {}),
        ({"zero": "0", "recompute": "full"}, {"zero_stage": 0, "recompute": "full"}),
        ({"zero": "auto", "loss": "plain", "shard_ranks": 8}, {"loss": "plain", "shard_ranks": 8}),
        ({"freeze_vision": True}, {"freeze_vision": True}),
        ({"lora": "r=4"}, {"lora": "r=4"}),
    ],
)
def test_what_was_asked_for_replaces_what_was_planned(request_: dict[str, Any], changed: dict[str, Any]) -> None:
    planned = Recipe(zero_stage=2, recompute="selective")
    expected = Recipe(**{"zero_stage": 2, "recompute": "selective", **changed})
    assert RecipeRequest(**request_).applied_to(planned) == expected


def test_the_flags_of_a_recipe_ask_for_it() -> None:
    recipe = Recipe(
        zero_stage=3, reduce="step", precision="amp", recompute="full", offload="activations", shard_ranks=8
    )
    assert " ".join(recipe.flags()) == snapshot(
        "--zero 3 --precision amp --recompute full --offload activations --reduce step --shard-ranks 8"
    )
    tuned = Recipe(freeze="visual.*,layers.[0-3].*"), Recipe(lora="r=4,target=q_proj")
    assert [one.flags()[6:] for one in tuned] == [
        ["--freeze", "visual.*,layers.[0-3].*"],
        ["--lora", "r=4,target=q_proj"],
    ]
    assert recipe.describe() == snapshot(
        "ZeRO-3, amp, full recomputation, chunked loss, offloaded activations, sharded over 8 ranks"
    )


def test_weights_gathered_in_every_microbatch_need_a_plan_in_waves() -> None:
    with raises(
        snapshot(
            "UsageError: --zero 3 gathers weights in every micro-batch, of which ranks run different numbers under sync iteration; give --zero 2, or plan with 'fcp plan --sync microbatch'"
        )
    ):
        check_recipe(Recipe(zero_stage=3), sync="iteration")


def test_offloading_needs_layers_that_are_recomputed() -> None:
    with pytest.raises(UsageError, match="add --recompute full"):
        check_recipe(Recipe(offload="activations"), sync="iteration")
