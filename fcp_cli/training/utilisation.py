"""Model FLOPs utilization (MFU): a step's operations relative to the devices' peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fcp_cli.cost.model import windowed_pairs
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.cluster import known_cluster, load_cluster
from fcp_cli.models.model import ModelSpec
from fcp_cli.models.operations import forward_operations
from fcp_cli.plan.step import StepPlan
from fcp_cli.recipe import Recipe

_HALF_PRECISIONS = ("bf16", "amp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A device's peak performance from its data sheet.

    Attributes:
        flops: dense 16-bit FLOP/s.
        source: shipped cluster description it is from.
    """

    flops: float
    source: str


def peak_of(device_name: str, recipe: Recipe) -> Peak | None:
    """Return a device's peak; None if unknown, or if the recipe's matrix products are not 16-bit."""
    name = known_cluster(device_name)
    if name is None or recipe.precision not in _HALF_PRECISIONS:
        return None
    return Peak(flops=load_cluster(name).peak_flops, source=name)


def model_flops(spec: ModelSpec, recipe: Recipe, lengths: np.ndarray) -> float:
    """Count the language model's operations in a step, without recomputation (Chowdhery et al., PaLM).

    Each matrix parameter costs two operations per token in forward, two for the input gradient if an earlier weight is
    trained, and two for the weight gradient if it is trained. A token attends to half of its sequence. Encoders are not
    counted.

    Args:
        spec: the model.
        recipe: determines the trained part.
        lengths: [sequences] lengths in tokens.
    """
    forward, backward, length = forward_operations(spec), backward_of(spec, recipe), lengths.astype(np.float64)
    attention = forward.attention_per_token2 * float(np.square(length).sum())
    if spec.window_tokens is not None:
        attention += forward.window_per_token2 * float(windowed_pairs(length, spec.window_tokens).sum())
    matrices = forward.linear_per_token * float(length.sum())
    return matrices * backward.language.total() + (1 + 2 * backward.layers) * attention


def utilisation(
    spec: ModelSpec, recipe: Recipe, plan: StepPlan, *, seconds: float, peak: Peak | None, ranks: int
) -> float | None:
    """Return the MFU of a step, or None if the peak is unknown."""
    if peak is None:
        return None
    return model_flops(spec, recipe, plan.lengths) / (seconds * ranks * peak.flops)
