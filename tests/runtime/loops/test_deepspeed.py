"""DeepSpeed engines under a plan train as the same engine does in one process on the same global batches."""

from __future__ import annotations

import pickle
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.launch import torchrun
from tests.runtime.loops.cases import NUM_RANKS, Trained, worst_difference, write_plans

pytestmark = pytest.mark.loops
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

CASES = [
    *(f"zero {stage} {sync}" for stage in (0, 1, 2) for sync in ("iteration", "microbatch")),
    "zero 2 once a step",
    "zero 3 microbatch",
    "zero 3 once a step",
    "zero 1 step inside",
    "zero 2 step inside",
    "zero 2 accumulation",
    "zero 2 clipping",
    "zero 2 offload",
]
ERRORS = {
    "no engine.step()": r"^the DeepSpeed engine took no step with the gradients of the plan's step before, .*; call engine",
    "zero 3 iteration": r"^the DeepSpeed engine has ZeRO stage 3 and gathers its weights again .*; set stage 2, or plan",
    "the module of an engine": r"^the parameter embedding.weight belongs to a DeepSpeed engine; give steps\(\) the engine$",
    "the module of zero 3": r"^the parameter embedding.weight belongs to a DeepSpeed engine; give steps\(\) the engine$",
}


@cache
def left() -> dict[str, Any]:
    """File name -> what a rank left there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_plans(folder)
        for ranks in (1, NUM_RANKS):
            torchrun("-m", "tests.runtime.workers.deepspeed_worker", name, num_ranks=ranks)
        return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pickle")}


@pytest.mark.parametrize("name", CASES)
def test_an_engine_trains_as_it_does_alone_on_the_same_global_batches(name: str) -> None:
    alone: Trained = left()[f"{name}-alone"]
    for rank in range(NUM_RANKS):
        found: Trained = left()[f"{name}-{rank}"]
        if "zero 0" in name:  # without clipping, stage 0 computes no norm
            assert np.isnan(found.norms).all()
            found = Trained(losses=found.losses, norms=[], weights=found.weights)
            assert worst_difference(found, Trained(losses=alone.losses, norms=[], weights=alone.weights)) <= 2e-6
        else:
            assert worst_difference(found, alone) <= 2e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_resumed_from_its_own_checkpoint_goes_on_as_if_it_had_not_stopped(stage: int) -> None:
    alone: Trained = left()[f"zero {stage} microbatch-alone"]
    for rank in range(NUM_RANKS):
        found: Trained = left()[f"resumed zero {stage}-{rank}"]
        assert len(found.losses) == 2
        assert worst_difference(found, alone.since(1)) <= 2e-6


@pytest.mark.parametrize("name", ERRORS)
def test_an_engine_that_cannot_follow_is_refused_in_one_line(name: str) -> None:
    for rank in range(NUM_RANKS):
        message = left()[f"{name}-{rank}"]
        assert re.search(ERRORS[name], message), message
        assert "\n" not in message
