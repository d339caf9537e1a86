"""Fits the prices of sharing heads: messages, and the share of a ring's bandwidth that exchanges reach.

A sample of a group of u x r ranks reads, with everything else known,

    seconds = rest + x bytes / bandwidth + exchange_seconds (u - 1),   bandwidth_share = 1 / x

Bytes are counted from the model. Coefficients that the samples do not determine stay near their
priors: a ring's bandwidth, and messages as they were timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.cost.fitting import Fit, Sample, fit_profile, predicted_seconds
from fcp_cli.cost.least_squares import robust_least_squares
from fcp_cli.cost.profile import CostProfile, Heads
from fcp_cli.errors import ProfileError

_LEAST = 1e-3  # of fitted values, in priors
_LEAST_SECONDS = 1e-6  # of messages that nobody timed, to begin with
# Against one sample: messages of ranks that share cores take ten times as long as alone.
_PRIOR_WEIGHT = 0.002


def fit_groups(samples: Sequence[Sample], prior: CostProfile, *, held_out: Sequence[Sample] = ()) -> Fit:
    """Fit samples of which some share heads: the rings as `fit_profile` does, then exchanges.

    If rings alone are too few, all samples are fitted with exchanges as the prior has them.
    """
    sharing = [sample for sample in samples if sample.heads_degree > 1]
    try:
        fit = fit_profile(_rings(samples), prior, held_out=_rings(held_out))
    except ProfileError:
        if not sharing:
            raise
        fit = fit_profile(samples, prior, held_out=held_out)
    if not sharing or fit.profile.heads is None:
        return fit
    profile = replace(fit.profile, heads=fit_heads(sharing, fit.profile, fit.profile.heads))
    errors = predicted_seconds(samples, profile) / np.array([sample.seconds for sample in samples]) - 1.0
    return replace(fit, profile=profile, relative_errors=errors)


def _rings(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.heads_degree == 1]


def fit_heads(samples: Sequence[Sample], profile: CostProfile, prior: Heads) -> Heads:
    """Fit `bandwidth_share` and `exchange_seconds` to groups that share heads; the rest of the profile stays."""
    measured = np.array([sample.seconds for sample in samples])

    def predicted(slowness: float, message_seconds: float) -> FloatArray:
        heads = replace(prior, bandwidth_share=1.0 / slowness, exchange_seconds=message_seconds)
        return predicted_seconds(samples, replace(profile, heads=heads))

    # Seconds are linear in both.
    # As good as no bytes: the share of the bandwidth is the inverse of this, which may not be 0.
    rest = predicted(1e-12, 0.0)
    columns = np.stack([predicted(1.0, 0.0) - rest, predicted(1e-12, 1.0) - rest], axis=1)
    start = np.array([1.0 / prior.bandwidth_share, max(prior.exchange_seconds, _LEAST_SECONDS)])
    weights = _PRIOR_WEIGHT * np.array([1.0, prior.exchange_seconds > 0])

    def errors(parameters: FloatArray) -> FloatArray:
        relative = (rest + columns @ parameters) / measured - 1.0
        return np.concatenate([relative, weights * (parameters / start - 1.0)])

    slowness, message_seconds = robust_least_squares(errors, start, (_LEAST * start, np.full(2, np.inf))).tolist()
    return replace(prior, bandwidth_share=1.0 / slowness, exchange_seconds=message_seconds)
