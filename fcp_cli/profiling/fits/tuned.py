"""Times of a job that trains a part of its model, from measurements with all of it trained."""

from __future__ import annotations

from dataclasses import fields, replace

from fcp_cli.cost.profile import Coefficients, CostProfile, Heads
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.model import ModelSpec
from fcp_cli.recipe import Recipe


def measured_recipe(spec: ModelSpec, recipe: Recipe) -> Recipe:
    """Return the recipe that packs are measured under for another: all of the language model is trained.

    A vision encoder of which nothing is trained is one that is timed frozen.
    """
    is_frozen = spec.vision is not None and not backward_of(spec, recipe).vision.inputs
    return replace(recipe, lora=None, freeze=None, freeze_vision=is_frozen)


def scaled_to_trained(profile: CostProfile, whole: CostProfile, tuned: CostProfile) -> tuple[CostProfile, str | None]:
    """Return a profile for the trained part, and its assumptions; None without any.

    Args:
        profile: fitted to the samples.
        whole: computed for the recipe that was measured.
        tuned: computed for the recipe that the profile is to be of.
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
        f"coefficients: all of the language model was trained while they were measured; computed for what is: {words}",
    )


def heads_of_trained(heads: Heads, whole: Heads, tuned: Heads) -> Heads:
    """Return the seconds of exchanges for the trained part, scaled from the whole model's by the counts of both."""
    names = ("exchange_bytes_per_token", "key_value_exchange_bytes_per_token", "exchange_seconds")
    counted = {name: getattr(tuned, name) / getattr(whole, name) for name in names}
    return replace(heads, **{name: ratio * getattr(heads, name) for name, ratio in counted.items()})
