"""Decide which micro-batches of a run are offloaded: those that would not fit otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from fcp_cli.memory.fitting import Place
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.recipe import Recipe
from fcp_cli.runtime import ActivationOffload


def open_offload(recipe: Recipe, model: str, metadata: PlanMetadata, device: torch.device) -> ActivationOffload | None:
    """Return what offloads the activations of a run; None where its recipe keeps them on the device.

    Args:
        recipe: of the run.
        model: its name, as `load_model` takes it.
        metadata: of the plan.
        device: of this rank. On a CPU there is nowhere else to go: every micro-batch is offloaded, for the sake of
            rehearsals.
    """
    if recipe.offload == "none":
        return None
    if device.type == "cpu":
        return ActivationOffload(device)
    total_bytes = float(torch.get_device_module(device).get_device_properties(device).total_memory)
    place = Place(
        ranks=metadata.num_ranks,
        ranks_per_node=metadata.ranks_per_node,
        capacity_bytes=total_bytes * (1 - RESERVE_FRACTION),
    )
    return ActivationOffload(device, above_tokens=tokens_without_offload(recipe, model, metadata, place))


def tokens_without_offload(recipe: Recipe, model: str, metadata: PlanMetadata, place: Place) -> int:
    """Return the most tokens of a micro-batch that a rank can hold with all activations on its device."""
    memory = place.memory(load_model(model), replace(recipe, offload="none"), metadata.sync)
    return memory.tokens(place.capacity_bytes)
