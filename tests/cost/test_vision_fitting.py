from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.vision_fitting import VisionCosts, VisionSample, fit_vision
from tests.messages import raises

TRUTH = VisionCosts(call_seconds=2e-3, seconds_per_patch=5e-6, seconds_per_patch2=3e-9)
CALLS = [(64,), (256,), (1024,), (4096,), (64,) * 16, (256,) * 8, (1024,) * 4, (144, 576, 1936)]


def samples_of(truth: VisionCosts) -> list[VisionSample]:
    calls = [VisionSample(part_patches=call, seconds=1.0) for call in CALLS]
    return [replace(one, seconds=t) for one, t in zip(calls, truth.predicted_seconds(calls).tolist(), strict=True)]


def closeness(found: VisionCosts, truth: VisionCosts = TRUTH) -> float:
    names = ("call_seconds", "seconds_per_patch", "seconds_per_patch2")
    return max(abs(float(getattr(found, name) / getattr(truth, name)) - 1) for name in names)


def test_attention_grows_with_the_square_of_a_part_and_not_of_a_call() -> None:
    one, many = TRUTH.predicted_seconds(
        [VisionSample(part_patches=(4096,), seconds=1.0), VisionSample(part_patches=(1024,) * 4, seconds=1.0)]
    ).tolist()
    assert one - many == pytest.approx(3e-9 * (4096**2 - 4 * 1024**2))


def test_exact_samples_give_back_the_coefficients() -> None:
    assert closeness(fit_vision(samples_of(TRUTH))) < 1e-4


def test_an_outlier_hardly_moves_the_fit() -> None:
    samples = samples_of(TRUTH)
    samples[2] = replace(samples[2], seconds=3 * samples[2].seconds)
    assert closeness(fit_vision(samples)) < 0.1


def test_no_coefficient_is_negative_where_attention_does_not_show() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.03, len(CALLS)).tolist()
    flat = samples_of(replace(TRUTH, seconds_per_patch2=0.0))
    found = fit_vision([replace(one, seconds=one.seconds * n) for one, n in zip(flat, noise, strict=True)])
    assert found.seconds_per_patch == pytest.approx(5e-6, rel=0.1)
    assert min(found.call_seconds, found.seconds_per_patch2) >= 0


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (CALLS[:3], snapshot("ProfileError: 3 measurements of the vision encoder are too few: at least 5")),
        (
            [(1024,) * n for n in range(1, 8)],
            snapshot(
                "ProfileError: the vision encoder was measured with parts of too few sizes; at least three are needed"
            ),
        ),
    ],
)
def test_calls_that_cannot_tell_are_refused(calls: list[tuple[int, ...]], message: str) -> None:
    with raises(message):
        fit_vision([VisionSample(part_patches=call, seconds=1e-3 * sum(call)) for call in calls])
