"""The law by which waves in lockstep are priced, on ranks that meet layer by layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fcp_cli.cost.profile import StepTerms
from fcp_cli.plan.pricing.timeline import step_times
from tests.runtime.launch import torchrun

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.full]

ENCODER, LANGUAGE = [0.4, 0.0, 0.1, 0.2], [0.1, 0.5, 0.4, 0.3]


def predicted(*, lockstep: bool) -> float:
    encoder, language = np.array(ENCODER), np.array(LANGUAGE)
    return step_times(
        "microbatch",
        wave=np.zeros(4, dtype=np.int32),
        rank_offsets=np.arange(5),
        ranks=np.arange(4, dtype=np.int32),
        seconds=encoder + language,
        num_ranks=4,
        terms=StepTerms(lockstep=lockstep),
        encoder_seconds=encoder,
    ).makespan_seconds


def test_ranks_that_meet_in_each_layer_wait_for_the_slowest_of_each_module(tmp_path: Path) -> None:
    out = tmp_path / "seconds.json"
    modules = [{"layers": 2, "seconds": ENCODER}, {"layers": 3, "seconds": LANGUAGE}]
    torchrun("-m", "tests.runtime.workers.lockstep_worker", str(out), json.dumps(modules), num_ranks=4)
    took = json.loads(out.read_text())
    assert predicted(lockstep=False) == pytest.approx(0.5)
    assert took >= predicted(lockstep=True) == pytest.approx(0.9)
    assert took < 1.3 * predicted(lockstep=True)
