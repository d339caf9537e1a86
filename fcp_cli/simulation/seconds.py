"""Measured times that scatter around the predicted ones."""

from __future__ import annotations

import numpy as np

from fcp_cli.plan.step import FloatArray, StepPlan


def scattered_seconds(step: StepPlan, seconds: FloatArray, *, sigma: float, seed: int) -> FloatArray:
    """`seconds` times lognormal noise of mean 1 per micro-batch.

    Args:
        step: the planned step; the noise of a step does not depend on which others are simulated.
        seconds: [microbatches] undisturbed.
        sigma: standard deviation of the logarithm; 0.08 scatters times by about 8 %.
        seed: the same seed gives the same noise.
    """
    draws = np.random.default_rng((seed, step.step)).standard_normal(len(seconds))
    return np.asarray(seconds * np.exp(sigma * draws - sigma * sigma / 2.0), dtype=np.float64)
