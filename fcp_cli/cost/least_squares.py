"""Least squares for cost fits: non-negative, and robust to outliers in relative error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray

# Larger relative errors are outliers: they count linearly instead of squared.
OUTLIER_RELATIVE_ERROR = 0.05


def mean_absolute_percentage(relative_errors: npt.ArrayLike) -> float:
    """Return the mean absolute relative error in percent."""
    return float(np.mean(np.abs(np.asarray(relative_errors)))) * 100.0


def num_determined(columns: FloatArray) -> int:
    """Return the numerical rank of a design matrix of relative columns, none of which may be all zero."""
    return int(np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0), tol=1e-6))


def non_negative_least_squares(columns: FloatArray, values: FloatArray) -> FloatArray:
    """Return the x >= 0 that minimizes |columns @ x - values|; the columns may have different units."""
    from scipy.optimize import nnls  # lazy: from the extra `fit`, which analytic profiles do not need

    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    # Unscaled, the solver would drop columns of small norm, such as messages next to bytes.
    return np.asarray(nnls(columns / norms, values)[0] / norms)


def robust_least_squares(
    relative_errors: Callable[[FloatArray], FloatArray], start: FloatArray, bounds: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the bounded parameters that minimize the soft-L1 loss of the relative errors; `start` must be > 0."""
    from scipy.optimize import least_squares  # lazy: from the extra `fit`, which analytic profiles do not need

    # Parameters are multiples of the start, since coefficients differ by many orders of magnitude.
    found = least_squares(
        lambda scaled: relative_errors(scaled * start),
        np.ones(len(start)),
        bounds=(bounds[0] / start, bounds[1] / start),
        loss="soft_l1",
        f_scale=OUTLIER_RELATIVE_ERROR,
        x_scale="jac",
    )
    return np.asarray(found.x * start)
