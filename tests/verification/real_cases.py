"""Recipes that real ranks run to have their memory measured, and the plan they follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.recipe import Recipe
from tests.runtime.plans import Row, write_plan

TOKENS = 2048  # of a rank in each micro-batch, and of each sequence: a ring of two has two of them

CASES: dict[str, tuple[Sync, Recipe]] = {
    "replicas": ("iteration", Recipe(zero_stage=0, precision="fp32", loss="plain")),
    "sharded-optimizer": ("iteration", Recipe(zero_stage=1, precision="bf16", recompute="full")),
    "sharded-gradients": ("iteration", Recipe(zero_stage=2, precision="bf16", recompute="selective")),
    "sharded-weights": ("microbatch", Recipe(zero_stage=3, precision="fp32", recompute="full")),
}


def settings_of(name: str) -> dict[str, Any]:
    """The trainer's settings that ask for a case's recipe."""
    _, recipe = CASES[name]
    return {
        "zero": str(recipe.zero_stage),
        "precision": recipe.precision,
        "recompute": recipe.recompute,
        "loss": recipe.loss,
    }


def write_case(path: Path, name: str, ranks: int) -> None:
    """Two steps of two micro-batches in a ring of all ranks."""
    sync, _ = CASES[name]
    ring = tuple(range(ranks))
    steps = [
        [Row(ring, (TOKENS,) * ranks, wave if sync == "microbatch" else -1) for wave in range(2)] for _ in range(2)
    ]
    write_plan(path, steps, num_ranks=ranks, sync=sync)
