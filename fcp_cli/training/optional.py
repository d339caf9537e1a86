"""Libraries that only some settings need. None is imported here: `fcp launch` looks before it starts anything."""

from __future__ import annotations

import importlib.util

from fcp_cli.errors import UsageError
from fcp_cli.extras import pip_install
from fcp_cli.recipe import Recipe
from fcp_cli.training.settings import TrainSettings


def require_libraries(recipe: Recipe, settings: TrainSettings) -> None:
    """Check that the packages of a run's settings can be imported."""
    if recipe.lora is not None:
        _require("peft", flag="--lora", install=pip_install("finetune", "peft"))
    if settings.wandb is not None:
        _require("wandb", flag="--wandb", install="pip install wandb")


def _require(package: str, *, flag: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{flag} needs {package}, which is not installed; run: {install}")
