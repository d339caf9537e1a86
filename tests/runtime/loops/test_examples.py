"""The examples of torchtune and torchtitan train as their models do in one process on the same global batches."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fcp_cli.plan.metadata import Sync
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.loops.cases import NUM_RANKS, SYNCS, Trained, worst_difference, write_plans

pytestmark = pytest.mark.loops


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("framework", ["torchtune", "torchtitan"])
def test_an_example_trains_as_its_model_does_alone_also_resumed_from_its_checkpoint(
    framework: str, sync: Sync, tmp_path: Path
) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    write_plans(tmp_path)
    torchrun(
        "-m",
        "tests.runtime.workers.example_worker",
        str(ROOT / "examples" / framework / "train.py"),
        str(tmp_path),
        num_ranks=NUM_RANKS,
        FCP_PLAN=str(tmp_path / f"{sync}.parquet"),
    )
    left: dict[str, Trained] = {path.stem: pickle.loads(path.read_bytes()) for path in tmp_path.glob("*.pickle")}
    assert len(left["planned"].norms) == 3
    assert worst_difference(left["planned"], left["alone"]) <= 2e-6
    assert ("resumed" in left) == (framework == "torchtitan")
    if "resumed" in left:
        assert len(left["resumed"].norms) == 2
        assert worst_difference(left["resumed"], left["alone"].since(1)) <= 2e-6
