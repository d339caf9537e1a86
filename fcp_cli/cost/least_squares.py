"""Least squares for the fits of costs: non-negative, and robust to outliers on relative error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray

# Residuals beyond this relative error count linearly instead of squared: outliers, not the rule.
OUTLIER_RELATIVE_ERROR = 0.05


def mean_absolute_percentage(relative_errors: npt.ArrayLike) -> float:
    """Return the mean of |relative error|, in per cent."""
    return float(np.mean(np.abs(np.asarray(relative_errors)))) * 100.0


def num_determined(columns: FloatArray) -> int:
    """Count the coefficients that samples determine, from their relative columns, none of which is zero throughout."""
    return int(np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0), tol=1e-6))


def non_negative_least_squares(columns: FloatArray, values: FloatArray) -> FloatArray:
    """Return x >= 0 of least |columns @ x - values|; the columns may be of unlike units."""
    from scipy.optimize import nnls  # of the extra `fit`, which computed profiles do without

    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    # Of columns of unlike norms, as of messages and bytes, the solver would lose the smaller ones.
    return np.asarray(nnls(columns / norms, values)[0] / norms)


def robust_least_squares(
    relative_errors: Callable[[FloatArray], FloatArray], start: FloatArray, bounds: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the bounded parameters of least squared relative error, outliers counted linearly; `start` is > 0."""
    from scipy.optimize import least_squares  # of the extra `fit`, which computed profiles do without

    # In multiples of the start: seconds of a pair of tokens and of a micro-batch differ by many powers of ten.
    found = least_squares(
        lambda scaled: relative_errors(scaled * start),
        np.ones(len(start)),
        bounds=(bounds[0] / start, bounds[1] / start),
        loss="soft_l1",
        f_scale=OUTLIER_RELATIVE_ERROR,
        x_scale="jac",
    )
    return np.asarray(found.x * start)
