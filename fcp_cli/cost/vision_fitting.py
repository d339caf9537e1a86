"""Fit of a vision encoder's cost to measured calls, on relative error and robust to outliers.

    seconds = beta + a * sum over parts of patches + b * sum over parts of patches^2

The encoder attends within a part: an image, a pair of frames, a tile. beta is the fixed cost of a call, which every
micro-batch of a vision model pays once.
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
    """Fitted coefficients beta, a and b; see the module."""

    call_seconds: float
    seconds_per_patch: float
    seconds_per_patch2: float

    def predicted_seconds(self, calls: Sequence[Sequence[int]]) -> FloatArray:
        """Predict [calls] seconds; each call is the list of patches per part."""
        coefficients = np.array([self.call_seconds, self.seconds_per_patch, self.seconds_per_patch2])
        return np.asarray(_columns(calls) @ coefficients)


def fit_vision(calls: Sequence[Sequence[int]], seconds: FloatArray) -> VisionCosts:
    """Fit non-negative coefficients by robust least squares, starting from non-negative least squares.

    Args:
        calls: measured calls, each a list of patches per part.
        seconds: [calls] seconds of forward, or of forward and backward.

    Raises:
        ProfileError: there are too few calls or too few distinct part sizes.
    """
    if len(calls) < LEAST_SAMPLES:
        raise ProfileError(f"{len(calls)} measurements of the vision encoder are too few: at least {LEAST_SAMPLES}")
    columns = _columns(calls)
    relative = columns / seconds[:, None]
    if num_determined(relative) < 3:
        raise ProfileError("the vision encoder was measured with parts of too few sizes; at least three are needed")
    solution = non_negative_least_squares(relative, np.ones(len(seconds)))
    # Zero coefficients start slightly above zero: the robust fit works in multiples of its start.
    start = np.maximum(solution, 1e-3 * np.median(seconds) / columns.max(axis=0))

    def relative_errors(parameters: FloatArray) -> FloatArray:
        return np.asarray(columns @ parameters / seconds - 1.0)

    bounds = np.zeros(3), np.full(3, np.inf)
    call, per_patch, per_patch2 = robust_least_squares(relative_errors, start, bounds).tolist()
    return VisionCosts(call_seconds=call, seconds_per_patch=per_patch, seconds_per_patch2=per_patch2)


def _columns(calls: Sequence[Sequence[int]]) -> FloatArray:
    """Return [calls, 3] the design matrix of the three coefficients."""
    return np.array([(1.0, float(sum(parts)), float(sum(patches * patches for patches in parts))) for parts in calls])
