from __future__ import annotations

import numpy as np
import pytest

from benchmarks.noise_study import scattered_seconds
from tests.plan.steps import Row, make_step


def test_noise_has_mean_one_and_depends_on_seed_and_step_only() -> None:
    step = make_step([Row([0], 1.0)] * 20_000)
    noisy = scattered_seconds(step, step.seconds, sigma=0.3, seed=1)
    assert noisy.mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(noisy).std() == pytest.approx(0.3, abs=0.01)
    np.testing.assert_array_equal(noisy, scattered_seconds(step, step.seconds, sigma=0.3, seed=1))
    other = make_step([Row([0], 1.0)] * 20_000, step=1)
    assert not np.array_equal(noisy, scattered_seconds(other, other.seconds, sigma=0.3, seed=1))
