"""Decides which micro-batches offload activations: those that would not fit otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch

from fcp_cli.cost.offload import PCIE_BYTES_PER_SECOND, profiled_offload_cost
from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.memory.fitting import JobRanks, sharing_ranks
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.recipe import Recipe
from fcp_cli.runtime import ActivationOffload


def open_offload(recipe: Recipe, model: str, metadata: PlanMetadata, device: torch.device) -> ActivationOffload | None:
    """Return the activation offloader of a run, or None if the recipe does not offload.

    Args:
        recipe: recipe of the run.
        model: model name for `load_model`.
        metadata: plan metadata.
        device: device of this rank. On a CPU, all micro-batches are offloaded, as a rehearsal.
    """
    if recipe.offload == "none":
        return None
    if device.type == "cpu":
        return ActivationOffload(device)
    total_bytes = float(torch.get_device_module(device).get_device_properties(device).total_memory)
    place = JobRanks(
        num_ranks=metadata.num_ranks,
        ranks_per_node=metadata.ranks_per_node,
        capacity_bytes=total_bytes * (1 - RESERVE_FRACTION),
        sharing=sharing_ranks(metadata.attention, metadata),
    )
    return ActivationOffload(device, above_tokens=tokens_without_offload(recipe, model, metadata, place))


def describe_offload(above_tokens: int, recipe: Recipe, model: str, metadata: PlanMetadata) -> str:
    """Describe which micro-batches are offloaded and, if the profile can price it, the cost of the longest."""
    longer = f" of more than {above_tokens} tokens per rank" if above_tokens else ""
    words = f"layer inputs are offloaded to host memory in micro-batches{longer}"
    if not metadata.cost_profile:
        return words
    spec, tokens = load_model(model), metadata.tokens_per_rank
    cost = profiled_offload_cost(
        parse_cost_profile(metadata.cost_profile, name="the plan's cost profile"),
        tokens=tokens,
        layers=spec.num_layers,
        input_bytes_per_token=precision_of(recipe).residual * spec.hidden_size,
    )
    return (
        f"{words}; with {tokens} tokens they are {cost.moved_bytes / 2e9:.1f} GB each way, and layers hide "
        f"{cost.hidden_seconds:.2f} of {cost.copy_seconds:.2f} s (estimate, {PCIE_BYTES_PER_SECOND / 1e9:.0f} GB/s)"
    )


def tokens_without_offload(recipe: Recipe, model: str, metadata: PlanMetadata, place: JobRanks) -> int:
    """Return the maximum tokens per rank of a micro-batch whose activations all stay on the device."""
    memory = place.memory(load_model(model), replace(recipe, offload="none"), metadata.sync)
    return memory.tokens(place.capacity_bytes)
