"""Fits to micro-batches of which some ranks share heads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.fitting import Sample, error_percent, fit_groups, fit_profile, predicted_seconds
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, Heads
from tests.messages import raises

TRUTH = CostProfile(
    model="qwen3-tiny",
    cluster="this-machine",
    origin="assumed",
    coefficients=Coefficients(
        attention_seconds_per_token2=3e-8,
        linear_seconds_per_token=5e-5,
        ring_bytes_per_token=3072,
        microbatch_seconds=4e-3,
        ring_hop_seconds=3e-3,
    ),
    bandwidth=Bandwidth(intra_node=4e8, inter_node=4e8),
    heads=Heads(
        query_heads=8,
        key_value_heads=2,
        exchange_bytes_per_token=8192,
        key_value_exchange_bytes_per_token=2048,
        exchange_seconds=2e-3,
        bandwidth_share=0.2,
    ),
)
RINGS = ((1, 1), (2, 1), (4, 1), (8, 1))
SETS = ((2, 2), (4, 4), (8, 2))


def drawn(groups: tuple[tuple[int, int], ...], lengths: tuple[int, ...] = (96, 512, 1024, 4096)) -> list[Sample]:
    """Samples of these degrees and heads degrees, as long as the truth says."""
    samples = [
        Sample(lengths=(length,), degree=degree, heads_degree=shared, seconds=1.0)
        for degree, shared in groups
        for length in lengths
    ]
    seconds = predicted_seconds(samples, TRUTH).tolist()
    return [replace(sample, seconds=found) for sample, found in zip(samples, seconds, strict=True)]


def prior() -> CostProfile:
    """What is counted, and guesses at the rest."""
    assert TRUTH.heads is not None
    heads = replace(TRUTH.heads, exchange_seconds=1e-4, bandwidth_share=1.0)
    c = replace(TRUTH.coefficients, attention_seconds_per_token2=1e-8, linear_seconds_per_token=1e-4)
    return replace(TRUTH, coefficients=c, heads=heads)


def test_exchanges_are_fitted_beside_rings_and_foretell_other_sets() -> None:
    fit = fit_groups([*drawn(RINGS), *drawn(SETS)], prior())
    assert fit.profile.heads is not None and TRUTH.heads is not None
    assert fit.profile.heads.bandwidth_share == pytest.approx(0.2, rel=0.1)
    assert fit.profile.heads.exchange_seconds == pytest.approx(2e-3, rel=0.1)
    assert np.abs(fit.relative_errors).max() < 0.05
    assert len(fit.relative_errors) == len([*RINGS, *SETS]) * 4
    others = drawn(((4, 2), (8, 8), (8, 4)), lengths=(700, 3000))
    assert error_percent(others, fit.profile) < 3.0
    assert error_percent(others, prior()) > 30.0


def test_rings_are_fitted_alike_whatever_shares_heads_beside_them() -> None:
    alone = fit_profile(drawn(RINGS), prior()).profile
    beside = fit_groups([*drawn(RINGS), *drawn(SETS)], prior()).profile
    assert (beside.coefficients, beside.bandwidth) == (alone.coefficients, alone.bandwidth)


def test_a_run_with_few_rings_is_fitted_with_exchanges_as_they_were() -> None:
    samples = drawn(((1, 1),), lengths=(96, 512)) + drawn(SETS)
    known = replace(prior(), heads=TRUTH.heads)
    fit = fit_groups(samples, known)
    assert error_percent(samples, fit.profile) < 1.0 < 15.0 < error_percent(samples, known)
    with raises(
        snapshot(
            "ProfileError: 2 samples are too few: a fit needs at least 5; 3 more are missing, so that there are packs of three different lengths or more"
        )
    ):
        fit_groups(samples[:2], known)
