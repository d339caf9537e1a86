"""DeepSpeed engines under a plan train as the same engine does in one process on the same global batches."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.launch import run_worker
from tests.runtime.loops.cases import NUM_RANKS, worst_difference, write_plans

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.runtime.workers.deepspeed_worker import CASES, RESUMED

pytestmark = pytest.mark.loops

ERRORS = {
    "no engine.step()": r"^the DeepSpeed engine took no step with the gradients of the plan's step before, .*; call engine",
    "zero 3 iteration": r"^the DeepSpeed engine has ZeRO stage 3 and gathers its weights again .*; set stage 2, or plan",
    "the module of an engine": r"^the parameter embedding.weight belongs to a DeepSpeed engine; give steps\(\) the engine$",
    "the module of zero 3": r"^the parameter embedding.weight belongs to a DeepSpeed engine; give steps\(\) the engine$",
}


@cache
def left() -> dict[str, list[Any]]:
    """Case -> what each rank left, or the one process alone."""
    with tempfile.TemporaryDirectory() as name:
        write_plans(Path(name))
        run_worker("deepspeed_worker", Path(name), num_ranks=1)
        return run_worker("deepspeed_worker", Path(name), num_ranks=NUM_RANKS)


@pytest.mark.parametrize("name", CASES)
def test_an_engine_trains_as_it_does_alone_on_the_same_global_batches(name: str) -> None:
    [alone] = left()[f"{name}, alone"]
    assert len(left()[name]) == NUM_RANKS
    for found in left()[name]:
        if "zero 0" in name:  # without clipping, stage 0 computes no norm
            assert np.isnan(found.norms).all()
            assert worst_difference(replace(found, norms=[]), replace(alone, norms=[])) <= 2e-6
        else:
            assert worst_difference(found, alone) <= 2e-6


@pytest.mark.parametrize(("name", "stage"), RESUMED.items())
def test_an_engine_resumed_from_its_own_checkpoint_goes_on_as_if_it_had_not_stopped(name: str, stage: int) -> None:
    [alone] = left()[f"zero {stage} microbatch, alone"]
    for found in left()[name]:
        assert len(found.losses) == 2
        assert worst_difference(found, alone.since(1)) <= 2e-6


@pytest.mark.parametrize("name", ERRORS)
def test_an_engine_that_cannot_follow_is_refused_in_one_line(name: str) -> None:
    for message in left()[name]:
        assert re.search(ERRORS[name], message), message
        assert "\n" not in message
