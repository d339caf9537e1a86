"""Converts times measured with all weights trained to a job that trains only part of the model."""

from __future__ import annotations

from dataclasses import fields, replace

from fcp_cli.cost.profile import Coefficients, CostProfile, Heads
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe


def measured_recipe(spec: ModelSpec, recipe: Recipe) -> Recipe:
    """Return the recipe under which packs are measured: the full language model is trained.

    A vision encoder without trained weights is timed frozen.
    """
    is_frozen = spec.vision is not None and not backward_of(spec, recipe).vision.inputs
    return replace(recipe, lora=None, freeze=None, freeze_vision=is_frozen)


def scaled_to_trained(profile: CostProfile, whole: CostProfile, tuned: CostProfile) -> tuple[CostProfile, str | None]:
    """Return the profile scaled to the trained part, and the assumption made, or None.

    Args:
        profile: fitted profile.
        whole: computed profile of the measured recipe.
        tuned: computed profile of the wanted recipe.
    """
    ratios = {
        f.name: getattr(tuned.coefficients, f.name) / before
        for f in fields(Coefficients)
        if (before := getattr(whole.coefficients, f.name))
    }
    changed = {name: ratio for name, ratio in ratios.items() if ratio != 1.0}
    if not changed:
        return profile, None
    words = ", ".join(f"{name} x {ratio:.3g}" for name, ratio in changed.items())
    return (
        profile.with_coefficients(
            lambda c: replace(c, **{name: ratio * getattr(c, name) for name, ratio in changed.items()})
        ),
        f"coefficients: measured with the full language model trained, then scaled to the trained part: {words}",
    )


def heads_of_trained(heads: Heads, whole: Heads, tuned: Heads) -> Heads:
    """Return the all-to-all costs scaled to the trained part by counted bytes and messages."""
    names = ("exchange_bytes_per_token", "key_value_exchange_bytes_per_token", "exchange_seconds")
    counted = {name: getattr(tuned, name) / getattr(whole, name) for name in names}
    return replace(heads, **{name: ratio * getattr(heads, name) for name, ratio in counted.items()})
