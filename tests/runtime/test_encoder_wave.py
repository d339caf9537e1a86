"""An encoder that all ranks of a wave share: as much sooner as predicted."""

from __future__ import annotations

import pytest

from benchmarks.encoder_wave import measure

pytestmark = [pytest.mark.torch, pytest.mark.full, pytest.mark.distributed, pytest.mark.processes]


def test_sharing_over_the_wave_takes_the_predicted_seconds_on_four_ranks() -> None:
    found = measure()
    for outcome in found.values():
        assert outcome.measured_seconds == pytest.approx(outcome.predicted_seconds, rel=0.15)
    assert found["ring"].measured_seconds > 1.1 * found["wave"].measured_seconds
