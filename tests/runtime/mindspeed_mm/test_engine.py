"""MindSpeed-MM's FSDP2 engine under a plan, unmodified, on Qwen3-VL with images and videos, beside one process."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from fcp_cli.errors import RunError
from fcp_cli.integrations.mindspeed_mm import hook_engine, hook_sharding
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.plans import write_plan
from tests.runtime.vision_models import VisionCase, alone, rows

pytestmark = [pytest.mark.hf, pytest.mark.distributed]

NUM_RANKS = 2
STEPS = (
    [
        *rows(([0, 1], (0, 1)), first=0, wave=0),
        *rows(([0], (2, 3)), ([1], (4,)), first=2, wave=1),
        *rows(([0, 1], (0, 1, 2)), first=5, wave=2),
    ],
    [*rows(([0], (3,)), ([1], (4, 0, 1)), first=8, wave=0), *rows(([0, 1], (2, 3, 4, 0)), first=12, wave=1)],
)


def train(folder: Path, *sources: str) -> list[dict[str, Any]]:
    """What each rank's engine found."""
    write_plan(folder / "plan.parquet", STEPS, num_ranks=NUM_RANKS, sync="microbatch", rows=16)
    path = os.pathsep.join((*sources, str(ROOT)))
    torchrun("-m", "tests.runtime.mindspeed_mm.worker", str(folder), num_ranks=NUM_RANKS, PYTHONPATH=path)
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(NUM_RANKS)]


def assert_as_one_process(folder: Path, found: list[dict[str, Any]]) -> None:
    expected = alone(VisionCase(labelled=True), folder / "plan.parquet")
    for rank in found:
        np.testing.assert_allclose(rank["planned"]["losses"], expected.losses, rtol=0.0, atol=1e-12)
        difference = np.abs(np.stack(rank["planned"]["gradients"]) - expected.gradients).max()
        print(f"worst gradient error {difference / np.abs(expected.gradients).max():.0e} of the largest")
        assert difference <= 1e-11 * np.abs(expected.gradients).max()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("mindspeed_mm")
    return folder, train(folder)


def test_the_engine_as_it_is_has_losses_and_gradients_of_one_process(found: tuple[Path, list[dict[str, Any]]]) -> None:
    assert_as_one_process(*found)


def test_an_engine_with_another_batch_than_the_plans_stops_with_one_line(
    found: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in found[1]:
        assert rank["other batch"] == (
            "the script trains on 4 sequences a step (training.global_batch_size), but the plan on 8; plan with 'fcp "
            "plan --global-batch-size 4', or give the script the plan's"
        )


def test_real_mindspeed_mm_has_losses_and_gradients_of_one_process(tmp_path: Path) -> None:
    sources = os.environ.get("FCP_MINDSPEED_MM_SOURCE"), os.environ.get("FCP_MINDSPEED_SOURCE")
    if not all(sources):
        pytest.skip("opt-in: FCP_MINDSPEED_MM_SOURCE and FCP_MINDSPEED_SOURCE name checkouts of both")
    assert_as_one_process(tmp_path, train(tmp_path, *(str(source) for source in sources)))


def test_a_version_without_the_engine_is_named() -> None:
    for hook, missing in ((hook_engine, "TrainEngine.train_step"), (hook_sharding, "ParallelApplier.__call__")):
        with pytest.raises(RunError, match=rf"^this MindSpeed-MM has no other\.{missing}; version known to work: "):
            hook(ModuleType("other"))
