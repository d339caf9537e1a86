from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.cost.fitting import Sample, error_percent, fit_profile, mean_absolute_percentage, predicted_seconds
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, Bandwidth, Coefficients, CostProfile, dump_cost_profile
from tests.messages import raises

TRUTH = CostProfile(
    model="m",
    cluster="c",
    origin="assumed",
    coefficients=Coefficients(
        attention_seconds_per_token2=3e-8,
        linear_seconds_per_token=5e-5,
        ring_bytes_per_token=3072,
        microbatch_seconds=2e-3,
        ring_hop_seconds=1e-3,
    ),
    bandwidth=Bandwidth(intra_node=2e7, inter_node=1e7),
)
# A ring that attention outlasts from some 500 tokens on, and of which it hides no more than two fifths.
EXPOSED = replace(
    TRUTH,
    coefficients=replace(TRUTH.coefficients, exposed_ring_share=0.6),
    bandwidth=Bandwidth(intra_node=2e8, inter_node=2e8),
)
# What a fit starts from: another machine's figures.
PRIOR = replace(
    TRUTH,
    coefficients=replace(
        TRUTH.coefficients,
        attention_seconds_per_token2=1e-9,
        linear_seconds_per_token=1e-6,
        microbatch_seconds=0.5,
        ring_hop_seconds=1e-4,
    ),
    bandwidth=Bandwidth(intra_node=1e9, inter_node=1e9),
)
PACKS = [(64,), (128,), (256,), (512,), (1024,), (2048,), (4096,), (64,) * 8, (256,) * 8, (1024,) * 3]


def _samples(truth: CostProfile, degrees: tuple[int, ...] = (1, 2, 4), crosses_nodes: bool = False) -> list[Sample]:
    drawn = [
        Sample(lengths=p, degree=d, seconds=1.0, crosses_nodes=crosses_nodes and d > 1) for d in degrees for p in PACKS
    ]
    return [replace(s, seconds=float(t)) for s, t in zip(drawn, predicted_seconds(drawn, truth), strict=True)]


def _closeness(found: CostProfile, truth: CostProfile) -> float:
    names = ("attention_seconds_per_token2", "linear_seconds_per_token", "microbatch_seconds")
    return float(max(abs(getattr(found.coefficients, name) / getattr(truth.coefficients, name) - 1) for name in names))


def test_exact_samples_give_back_the_coefficients() -> None:
    fit = fit_profile(_samples(TRUTH), PRIOR)
    assert _closeness(fit.profile, TRUTH) < 0.01
    assert fit.profile.coefficients.ring_hop_seconds == pytest.approx(1e-3, rel=0.05)
    assert fit.profile.bandwidth.intra_node == pytest.approx(2e7, rel=0.05)
    assert mean_absolute_percentage(fit.relative_errors) < 0.5
    assert fit.kept == ("bandwidth_bytes_per_second.inter_node",)


def test_no_coefficient_becomes_negative_where_short_packs_are_quicker_than_any_line() -> None:
    """Times that only a negative fixed cost would explain, as kernels that pay off with length give."""
    samples = [replace(s, seconds=s.seconds - 3.5e-3) for s in _samples(TRUTH, (1,))]
    found = fit_profile([s for s in samples if s.seconds > 1e-3], PRIOR).profile.coefficients
    assert found.microbatch_seconds == pytest.approx(0.0, abs=1e-5)
    assert found.attention_seconds_per_token2 > 0 and found.linear_seconds_per_token > 0


def test_rings_across_nodes_give_their_own_bandwidth() -> None:
    fit = fit_profile(_samples(TRUTH) + _samples(TRUTH, (2, 4), crosses_nodes=True), PRIOR)
    assert fit.profile.bandwidth.inter_node == pytest.approx(1e7, rel=0.05)
    assert fit.kept == ()


def test_outliers_hardly_move_the_fit() -> None:
    samples = _samples(TRUTH)
    draw = random.Random(1)
    for position in draw.sample(range(len(samples)), 4):
        samples[position] = replace(samples[position], seconds=samples[position].seconds * 3)
    assert _closeness(fit_profile(samples, PRIOR).profile, TRUTH) < 0.05


def test_without_rings_the_prior_is_kept() -> None:
    fit = fit_profile(_samples(TRUTH, (1,)), PRIOR)
    assert fit.profile.bandwidth == PRIOR.bandwidth
    assert fit.profile.coefficients.ring_hop_seconds == PRIOR.coefficients.ring_hop_seconds
    assert "coefficients.ring_hop_seconds" in fit.kept


def test_silent_peers_say_nothing_about_the_ring() -> None:
    quick = replace(TRUTH, coefficients=replace(TRUTH.coefficients, ring_bytes_per_token=0.0, ring_hop_seconds=0.0))
    samples = [replace(s, silent=s.degree > 1) for s in _samples(quick)]
    fit = fit_profile(samples, PRIOR)
    assert fit.profile.bandwidth == PRIOR.bandwidth
    assert _closeness(fit.profile, TRUTH) < 0.01


def _split(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """What is fitted, and every fourth sample held out."""
    return [s for i, s in enumerate(samples) if i % 4], samples[::4]


def test_an_exposed_share_of_the_ring_is_found_and_written_with_its_common_ground() -> None:
    fitted, held_out = _split(_samples(EXPOSED))
    fit = fit_profile(fitted, PRIOR, held_out=held_out)
    assert fit.profile.coefficients.exposed_ring_share == pytest.approx(0.6, abs=0.02)
    assert _closeness(fit.profile, TRUTH) < 0.01
    assert fit.held_out_percent[EXPOSED_RING] < 0.2 < 2.0 < fit.held_out_percent[HIDDEN_RING]
    text = dump_cost_profile(fit.profile)
    assert text.startswith("format: fcp-cost-profile/1")
    assert "exposed_ring_share" in text
    assert "common_ground" in text


def test_the_common_ground_is_the_best_fit_without_an_exposed_share() -> None:
    fitted, held_out = _split(_samples(EXPOSED))
    found = fit_profile(fitted, PRIOR, held_out=held_out).profile
    alone = fit_profile(fitted, PRIOR).profile
    assert alone.common_ground is None
    assert error_percent(held_out, found.on_common_ground()) == error_percent(held_out, alone)


def test_no_share_is_exposed_where_the_whole_ring_may_hide() -> None:
    fitted, held_out = _split(_samples(TRUTH))
    noise = np.random.default_rng(0).normal(1.0, 0.02, len(fitted))
    noisy = [replace(s, seconds=s.seconds * float(n)) for s, n in zip(fitted, noise, strict=True)]
    fit = fit_profile(noisy, PRIOR, held_out=held_out)
    assert fit.profile.common_ground is None
    assert set(fit.held_out_percent) == {HIDDEN_RING, EXPOSED_RING}


def test_without_rings_a_prior_with_an_exposed_share_keeps_it() -> None:
    fitted, held_out = _split(_samples(EXPOSED))
    prior = fit_profile(fitted, PRIOR, held_out=held_out).profile
    slower = replace(TRUTH, coefficients=replace(TRUTH.coefficients, linear_seconds_per_token=8e-5))
    found = fit_profile(_samples(slower, (1,)), prior).profile
    assert found.coefficients.exposed_ring_share == prior.coefficients.exposed_ring_share
    assert found.common_ground is not None
    for coefficients in (found.coefficients, found.common_ground.coefficients):
        assert coefficients.linear_seconds_per_token == pytest.approx(8e-5, rel=0.01)


SILENT: dict[str, list[Sample]] = {
    "too few": [Sample(lengths=(64,), degree=1, seconds=1.0)] * 3,
    "packs of one size": [Sample(lengths=(64,), degree=1, seconds=1.0)] * 9,
    "sequences of one length": [Sample(lengths=(64,) * n, degree=1, seconds=float(n)) for n in range(1, 9)],
    "two lengths": [Sample(lengths=(n,), degree=1, seconds=float(n)) for n in (64, 128) * 4],
    "no time": [Sample(lengths=(64,), degree=1, seconds=0.0)],
    "patches in proportion to tokens": [
        replace(sample, patches=4.0 * sum(sample.lengths)) for sample in _samples(TRUTH)
    ],
}
SILENT_MESSAGES = snapshot(
    {
        "too few": "ProfileError: 3 samples are too few: a fit needs at least 5; 2 more are missing, so that there are packs of three different lengths or more",
        "packs of one size": "ProfileError: all samples have 64 tokens per rank; microbatch_seconds and linear_seconds_per_token need packs of at least two sizes",
        "sequences of one length": "ProfileError: all samples have sequences of 64 tokens; attention_seconds_per_token2 and linear_seconds_per_token need at least two lengths",
        "two lengths": "ProfileError: the samples cannot tell attention, linear work and the fixed cost apart: measure packs of at least three different lengths",
        "no time": "ProfileError: a sample of lengths [64] took 0.0 s; it cannot be fitted",
        "patches in proportion to tokens": "ProfileError: the samples cannot tell the vision encoder from the language model, since all packs have patches in proportion to their tokens; measure the encoder with 'fcp profile', or add a run on mixed data",
    }
)


@pytest.mark.parametrize("case", SILENT)
def test_samples_that_cannot_tell_say_what_is_missing(case: str) -> None:
    with raises(SILENT_MESSAGES[case]):
        fit_profile(SILENT[case], PRIOR)


@settings(max_examples=25)
@given(
    alpha1=st.floats(1e-10, 1e-6),
    alpha2=st.floats(1e-6, 1e-3),
    beta1=st.floats(1e-4, 1e-1),
    seed=st.integers(0, 1000),
)
def test_a_noisy_fit_predicts_within_the_noise(alpha1: float, alpha2: float, beta1: float, seed: int) -> None:
    truth = replace(
        TRUTH,
        coefficients=replace(
            TRUTH.coefficients,
            attention_seconds_per_token2=alpha1,
            linear_seconds_per_token=alpha2,
            microbatch_seconds=beta1,
        ),
    )
    clean = _samples(truth)
    noise = np.random.default_rng(seed).normal(1.0, 0.02, len(clean))
    fit = fit_profile([replace(s, seconds=s.seconds * float(n)) for s, n in zip(clean, noise, strict=True)], PRIOR)
    exact = np.array([s.seconds for s in clean])
    assert mean_absolute_percentage(predicted_seconds(clean, fit.profile) / exact - 1.0) < 3.0
