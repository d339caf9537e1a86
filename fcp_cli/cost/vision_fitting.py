"""Fits the cost of a vision encoder to measured calls of it, on relative error and robust to outliers.

    seconds = beta + a * sum over parts of patches + b * sum over parts of patches^2

The encoder attends within a part: an image, a pair of frames, a tile. beta is the cost of a call whatever it is
given, which every micro-batch of a vision model pays once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.cost.fitting import LEAST_SAMPLES
from fcp_cli.cost.least_squares import non_negative_least_squares, num_determined, robust_least_squares
from fcp_cli.errors import ProfileError


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionCosts:
    """Coefficients of a call; see the module."""

    call_seconds: float
    seconds_per_patch: float
    seconds_per_patch2: float

    def predicted_seconds(self, calls: Sequence[Sequence[int]]) -> FloatArray:
        """Predict [calls] seconds of calls, each given as the patches of its parts."""
        coefficients = np.array([self.call_seconds, self.seconds_per_patch, self.seconds_per_patch2])
        return np.asarray(_columns(calls) @ coefficients)


def fit_vision(calls: Sequence[Sequence[int]], seconds: FloatArray) -> VisionCosts:
    """Fit by non-negative least squares, then robustly from there; no coefficient is ever negative.

    Args:
        calls: measured calls, each given as the patches of its parts.
        seconds: [calls] of forward, or forward and backward.

    Raises:
        ProfileError: the calls are too few, or too alike.
    """
    if len(calls) < LEAST_SAMPLES:
        raise ProfileError(f"{len(calls)} measurements of the vision encoder are too few: at least {LEAST_SAMPLES}")
    columns = _columns(calls)
    relative = columns / seconds[:, None]
    if num_determined(relative) < 3:
        raise ProfileError("the vision encoder was measured with parts of too few sizes; at least three are needed")
    solution = non_negative_least_squares(relative, np.ones(len(seconds)))
    # A coefficient at zero starts at a small share of the time, so that the robust fit can move it.
    start = np.maximum(solution, 1e-3 * np.median(seconds) / columns.max(axis=0))

    def relative_errors(parameters: FloatArray) -> FloatArray:
        return np.asarray(columns @ parameters / seconds - 1.0)

    bounds = np.zeros(3), np.full(3, np.inf)
    call, per_patch, per_patch2 = robust_least_squares(relative_errors, start, bounds).tolist()
    return VisionCosts(call_seconds=call, seconds_per_patch=per_patch, seconds_per_patch2=per_patch2)


def _columns(calls: Sequence[Sequence[int]]) -> FloatArray:
    """Return [calls, 3] the factors of the three coefficients."""
    return np.array([(1.0, float(sum(parts)), float(sum(patches * patches for patches in parts))) for parts in calls])
