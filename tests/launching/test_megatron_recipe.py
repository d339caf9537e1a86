"""A Megatron script whose arguments ask for another recipe than its plan's is told so before it is submitted."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Recipe
from fcp_cli.launching.program import through_entry
from tests.launching.jobs import plan_metadata
from tests.launching.test_checks import found

ASKED = "pretrain_gpt.py --calculate-per-token-loss --attention-dropout 0 "
ZERO_1 = "--bf16 --use-distributed-optimizer "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers "


def warned(script: str, **recipe: Any) -> list[str]:
    program, arguments = through_entry(shlex.split(script))
    planned = Recipe(**{"zero_stage": 1, "loss": "plain", **recipe})
    job = {"metadata": plan_metadata(model="qwen3-tiny", recipe=planned), "program": program, "arguments": arguments}
    lines = found("cuda", of=job)
    return [line.replace("may be others than planned", "...").partition(" fcp plan ")[0] for line in lines]


@pytest.mark.parametrize(
    ("script", "recipe"),
    [
        (f"{ASKED} {ZERO_1}", {}),
        (f"{ASKED} --bf16", {"zero_stage": 0}),
        (f"{ASKED} {ZERO_1} {FULL} 1", {"recompute": "full"}),
        (f"{ASKED} {ZERO_1} --recompute-activations --recompute-modules mlp layernorm", {"recompute": "selective"}),
        (f"{ASKED} {ZERO_1}", {"recompute": "as-needed"}),
        (
            f"{ASKED} --use-megatron-fsdp --data-parallel-sharding-strategy=optim_grads --bf16 "
            "--use-distributed-optimizer --cross-entropy-fusion-impl linear",
            {"zero_stage": 2, "loss": "chunked"},
        ),
        (
            "train.py --train-iters 0",
            {"zero_stage": 3, "recompute": "full", "loss": "chunked"},
        ),  # it may set all itself
        ("train.py --bf16", {"precision": "fp32"}),  # of nobody knows what
    ],
)
def test_a_script_with_the_plans_recipe_or_an_unknown_one_is_not_warned(script: str, recipe: dict[str, Any]) -> None:
    assert warned(script, **recipe) == []


@pytest.mark.parametrize(
    ("script", "recipe", "line"),
    [
        (
            f"{ASKED} --bf16",
            {"recompute": "full"},
            snapshot(
                "warning: pretrain_gpt.py has ZeRO-0, no recomputation, but plan.parquet was made for ZeRO-1, full recomputation of each layer: memory and times ...; give it --use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or plan with:"
            ),
        ),
        (
            f"{ASKED} {ZERO_1}",
            {"zero_stage": 3, "loss": "chunked", "precision": "fp32"},
            snapshot(
                "warning: pretrain_gpt.py has ZeRO-1, bf16, plain loss, but plan.parquet was made for ZeRO-3, fp32, chunked loss: memory and times ...; give it --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params and remove --bf16, and plan with:"
            ),
        ),
        (
            f"{ASKED} {ZERO_1} --recompute-granularity selective",
            {"recompute": "selective"},
            snapshot(
                "warning: pretrain_gpt.py has recomputation of core_attn alone, but plan.parquet was made for selective recomputation: memory and times ...; give it --recompute-granularity selective --recompute-modules layernorm mlp"
            ),
        ),
        (
            f"{ASKED} {ZERO_1} --recompute-granularity=selective",
            {},
            snapshot(
                "warning: pretrain_gpt.py has recomputation of core_attn alone, but plan.parquet was made for no recomputation: memory and times ...; remove --recompute-granularity selective"
            ),
        ),
        (
            f"{ASKED} {ZERO_1} {FULL} 4",
            {"recompute": "full"},
            snapshot(
                "warning: pretrain_gpt.py has full recomputation with --recompute-method uniform and --recompute-num-layers 4, but plan.parquet was made for full recomputation of each layer: memory and times ...; give it --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
            ),
        ),
        (
            f"{ASKED} {ZERO_1}",
            {"recompute": "elementwise"},
            snapshot(
                "warning: pretrain_gpt.py has no recomputation, but plan.parquet was made for elementwise recomputation: memory and times ...; plan with:"
            ),
        ),
        (
            f"{ASKED} {ZERO_1} --optimizer-cpu-offload --cpu-offloading",
            {},
            snapshot(
                "warning: pretrain_gpt.py has an offloaded optimizer, offloaded activations, but plan.parquet was made for an optimizer on the device, activations on the device: memory and times ...; remove --optimizer-cpu-offload and --cpu-offloading"
            ),
        ),
        (
            "train.py --use-distributed-optimizer",
            {"zero_stage": 0, "recompute": "full"},
            snapshot(
                "warning: train.py has ZeRO-1, but plan.parquet was made for ZeRO-0: memory and times ...; remove --use-distributed-optimizer, or plan with:"
            ),
        ),
        (
            "train.py --train-iters 0 --fp16",
            {"precision": "fp32"},
            snapshot(
                "warning: train.py has fp16, but plan.parquet was made for fp32: memory and times ...; remove --fp16, or plan with:"
            ),
        ),
        (
            f"{ASKED} {ZERO_1} {FULL} 1",
            {"recompute": "as-needed"},
            snapshot(
                "error: plan.parquet recomputes layers as needed, but the script recomputes them by itself; remove --recompute-granularity full"
            ),
        ),
    ],
)
def test_what_differs_is_one_line_with_its_remedy(script: str, recipe: dict[str, Any], line: str) -> None:
    assert "\n".join(warned(script, **recipe)) == line


def test_a_script_is_known_behind_the_entry_point_of_the_hooks() -> None:
    assert "unless given --calculate-per-token-loss" in warned(f"pretrain_gpt.py --attention-dropout 0 {ZERO_1}")[0]


def test_the_plan_that_fits_has_the_scripts_recipe() -> None:
    program, arguments = through_entry(
        shlex.split(f"{ASKED} --bf16 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params")
    )
    metadata = plan_metadata(model="qwen3-tiny", recipe=Recipe(zero_stage=1, loss="plain"))
    (line,) = found("cuda", of={"metadata": metadata, "program": program, "arguments": arguments})
    words = shlex.split(line.partition("plan with: ")[2])
    assert [words[words.index(flag) + 1] for flag in ("--zero", "--sync", "--loss")] == ["3", "microbatch", "plain"]
