from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.fitting import VisionCosts, fit_vision
from tests.messages import raises

TRUTH = VisionCosts(call_seconds=2e-3, seconds_per_patch=5e-6, seconds_per_patch2=3e-9)
CALLS = [(64,), (256,), (1024,), (4096,), (64,) * 16, (256,) * 8, (1024,) * 4, (144, 576, 1936)]


def closeness(found: VisionCosts, truth: VisionCosts = TRUTH) -> float:
    names = ("call_seconds", "seconds_per_patch", "seconds_per_patch2")
    return max(abs(float(getattr(found, name) / getattr(truth, name)) - 1) for name in names)


def test_attention_grows_with_the_square_of_a_part_and_not_of_a_call() -> None:
    one, many = TRUTH.predicted_seconds([(4096,), (1024,) * 4]).tolist()
    assert one - many == pytest.approx(3e-9 * (4096**2 - 4 * 1024**2))


def test_exact_samples_give_back_the_coefficients() -> None:
    assert closeness(fit_vision(CALLS, TRUTH.predicted_seconds(CALLS))) < 1e-4


def test_an_outlier_hardly_moves_the_fit() -> None:
    seconds = TRUTH.predicted_seconds(CALLS)
    seconds[2] *= 3
    assert closeness(fit_vision(CALLS, seconds)) < 0.1


def test_no_coefficient_is_negative_where_attention_does_not_show() -> None:
    noise = np.random.default_rng(0).normal(1.0, 0.03, len(CALLS))
    found = fit_vision(CALLS, noise * replace(TRUTH, seconds_per_patch2=0.0).predicted_seconds(CALLS))
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
        fit_vision(calls, np.array([1e-3 * sum(call) for call in calls]))
