"""Model FLOPs utilisation (MFU): arithmetic of a step against the devices' peak."""

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
    """The arithmetic that a device's data sheet promises.

    Attributes:
        flops: dense operations per second in 16 bits.
        source: the shipped cluster whose description says so.
    """

    flops: float
    source: str


def peak_of(device_name: str, recipe: Recipe) -> Peak | None:
    """Return a device's peak operations per second; None if unknown, or if the recipe's products are not of 16 bits."""
    name = known_cluster(device_name)
    if name is None or recipe.precision not in _HALF_PRECISIONS:
        return None
    return Peak(flops=load_cluster(name).peak_flops, source=name)


def model_flops(spec: ModelSpec, recipe: Recipe, lengths: np.ndarray) -> float:
    """Count the operations of the language model in a step, without recomputation (Chowdhery et al., PaLM).

    A token takes two operations with each parameter of a matrix in forward, two for the gradient of its input, if
    anything before is trained, and two for that of the matrix, if it is trained. In attention a token attends to half
    of its sequence. Encoders are not counted.

    Args:
        spec: the model.
        recipe: the recipe for the trained part.
        lengths: [sequences] tokens.
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
    """Return the share of all devices' peak that a step's arithmetic came to; None if that is not known."""
    if peak is None:
        return None
    return model_flops(spec, recipe, plan.lengths) / (seconds * ranks * peak.flops)
