"""Recipes that real ranks run to have their memory measured, and the plan they follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import Recipe
from fcp_cli.plan.metadata import Sync
from tests.runtime.plans import Row, levels_profile, write_plan

TOKENS = 2048  # of a rank in each micro-batch, and of each sequence: a ring of two has two of them

# Of the two layers, the first recomputes its matrices in a micro-batch of TOKENS.
LEVELS = levels_profile(
    RecomputeLevel(recompute="none", tokens=1500),
    RecomputeLevel(recompute="selective", tokens=4096, seconds_per_token=3e-5),
)

CASES: dict[str, tuple[Sync, Recipe]] = {
    "replicas": ("iteration", Recipe(zero_stage=0, precision="fp32", loss="plain")),
    "sharded-optimizer": ("iteration", Recipe(zero_stage=1, precision="bf16", recompute="full")),
    "sharded-gradients": ("iteration", Recipe(zero_stage=2, precision="bf16", recompute="selective")),
    "as-needed": ("iteration", Recipe(zero_stage=2, precision="bf16", recompute="as-needed")),
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
    sync, recipe = CASES[name]
    levels: dict[str, Any] = {"recipe": recipe, "cost_profile": LEVELS} if recipe.recompute == "as-needed" else {}
    ring = tuple(range(ranks))
    steps = [
        [Row(ring, (TOKENS,) * ranks, wave if sync == "microbatch" else -1) for wave in range(2)] for _ in range(2)
    ]
    write_plan(path, steps, num_ranks=ranks, sync=sync, **levels)
