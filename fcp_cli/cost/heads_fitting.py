"""Fit of the Ulysses exchange: message latency, and bandwidth as a share of the ring's.

The model of a sample on a group of u x r ranks, with everything else known, is

    seconds = rest + x bytes / bandwidth + exchange_seconds (u - 1),   bandwidth_share = 1 / x

Bytes are counted from the model. Undetermined coefficients stay near their priors: the ring's bandwidth and the
measured message latency.
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

_LEAST = 1e-3  # lower bound of fitted values, as a fraction of their starting values
_LEAST_SECONDS = 1e-6  # starting latency if the prior has none
# Weight of the prior against one sample. Low: latency grows tenfold if ranks share cores.
_PRIOR_WEIGHT = 0.002


def fit_groups(samples: Sequence[Sample], prior: CostProfile, *, held_out: Sequence[Sample] = ()) -> Fit:
    """Fit samples with and without Ulysses: `fit_profile` on pure rings, then the exchange on the others.

    If there are too few pure rings, `fit_profile` uses all samples with the prior's exchange prices.
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
    """Fit `bandwidth_share` and `exchange_seconds` to samples with a Ulysses degree > 1, keeping the rest fixed."""
    measured = np.array([sample.seconds for sample in samples])

    def predicted(slowness: float, message_seconds: float) -> FloatArray:
        heads = replace(prior, bandwidth_share=1.0 / slowness, exchange_seconds=message_seconds)
        return predicted_seconds(samples, replace(profile, heads=heads))

    # Seconds are linear in both parameters, so two differences give the columns.
    # 1e-12 stands for 0, which would divide by zero in the bandwidth share.
    rest = predicted(1e-12, 0.0)
    columns = np.stack([predicted(1.0, 0.0) - rest, predicted(1e-12, 1.0) - rest], axis=1)
    start = np.array([1.0 / prior.bandwidth_share, max(prior.exchange_seconds, _LEAST_SECONDS)])
    weights = _PRIOR_WEIGHT * np.array([1.0, prior.exchange_seconds > 0])

    def errors(parameters: FloatArray) -> FloatArray:
        relative = (rest + columns @ parameters) / measured - 1.0
        return np.concatenate([relative, weights * (parameters / start - 1.0)])

    slowness, message_seconds = robust_least_squares(errors, start, (_LEAST * start, np.full(2, np.inf))).tolist()
    return replace(prior, bandwidth_share=1.0 / slowness, exchange_seconds=message_seconds)
