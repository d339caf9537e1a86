"""Peak memory of a rank with as-needed recomputation, by the tokens of its micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fcp_cli.cost.recompute_levels import RecomputeLevel, layers_by_level
from fcp_cli.memory.table import RankMemory
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe


def as_needed_bytes(
    spec: ModelSpec,
    recipe: Recipe,
    levels: Sequence[RecomputeLevel],
    tokens: int,
    memory_of: Callable[[Recipe], RankMemory],
) -> float:
    """Return the peak memory in bytes of a rank whose first layers may recompute at a higher level than the others.

    It is the maximum of two moments: the start of the backward, when all layers hold their kept activations (the first
    ones fewer), and the start of the backward of the first layers, when the later layers have been freed.

    Args:
        spec: model; its layers are assumed to keep equal bytes.
        recipe: recipe of the plan.
        levels: levels of the plan's profile; the tokens select one or two of them.
        tokens: tokens of the rank in the micro-batch.
        memory_of: returns the memory of a rank if all layers follow a recipe.
    """
    number, count = layers_by_level(levels, tokens, spec.num_layers)
    # Clamped: at level 0 all layers use it, and there is no lower one.
    pair = [replace(recipe, recompute=levels[max(place, 0)].recompute) for place in (number - 1, number)]
    memories = [memory_of(one) for one in pair]
    low, high = (memory.total_bytes(tokens) for memory in memories)
    if count == spec.num_layers:
        return high
    of_low, of_high = (tokens * memory.kept_bytes_per_token / spec.num_layers for memory in memories)
    return max(low - count * (of_low - of_high), high - (spec.num_layers - count) * of_high)
