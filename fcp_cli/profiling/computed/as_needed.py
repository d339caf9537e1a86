"""Computes the cost profile of as-needed recomputation from profiles of its levels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recompute_levels import RecomputeLevel, convex
from fcp_cli.errors import UsageError
from fcp_cli.recipe import LayerRecompute, Recipe


def as_needed_profile(
    recipe: Recipe, tokens: Mapping[LayerRecompute, int], profile_of: Callable[[Recipe], CostProfile]
) -> CostProfile:
    """Return the profile of the first level, extended by the worthwhile levels.

    Args:
        recipe: recipe with as-needed recomputation.
        tokens: token capacity of a rank with all layers at each level.
        profile_of: computes the profile of a recipe with a single level.
    """
    profiles = {kind: profile_of(replace(recipe, recompute=kind)) for kind in tokens}
    first = profiles[next(iter(tokens))].coefficients.linear_seconds_per_token
    seconds = {kind: one.coefficients.linear_seconds_per_token - first for kind, one in profiles.items()}
    levels = convex(
        [
            RecomputeLevel(recompute=kind, tokens=count, seconds_per_token=seconds[kind])
            for kind, count in tokens.items()
        ]
    )
    base = profiles[levels[0].recompute]
    return replace(
        base,
        recipe=recipe,
        recompute_levels=tuple(
            replace(level, seconds_per_token=level.seconds_per_token - levels[0].seconds_per_token) for level in levels
        ),
        measurement={**base.measurement, "recompute": recipe.recompute},
    )


def with_level_tokens(profile: CostProfile, tokens: Mapping[LayerRecompute, int]) -> CostProfile:
    """Return a profile with as-needed recomputation, adapted to other token capacities of its levels.

    Raises:
        UsageError: no token fits at its first level, to which its times apply.
    """
    levels = convex(
        [
            replace(level, tokens=tokens[level.recompute])
            for level in profile.recompute_levels
            if level.recompute in tokens
        ]
    )
    first = profile.recompute_levels[0].recompute
    if levels[0].recompute != first:
        raise UsageError(
            f"the cost profile of {profile.model} on {profile.cluster} has times for recomputation {first}, with "
            "which no token fits on these ranks; remove --profile, or plan for more --ranks"
        )
    found = replace(profile, recompute_levels=levels)
    return replace(found, text=dump_cost_profile(found))
