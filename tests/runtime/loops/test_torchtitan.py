"""The example of torchtitan trains as torchtitan's model does in one process on the same global batches."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fcp_cli.plan.metadata.plan_metadata import Sync
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.loops.cases import NUM_RANKS, SYNCS, Trained, worst_difference, write_plans

pytestmark = pytest.mark.loops
pytest.importorskip("torchtitan", reason="torchtitan is not installed")


@pytest.mark.parametrize("sync", SYNCS)
def test_the_debug_model_trains_as_it_does_alone_also_resumed_from_its_checkpoint(sync: Sync, tmp_path: Path) -> None:
    write_plans(tmp_path)
    torchrun(
        "-m",
        "tests.runtime.workers.torchtitan_worker",
        str(ROOT / "examples" / "torchtitan" / "train.py"),
        str(tmp_path),
        num_ranks=NUM_RANKS,
        FCP_PLAN=str(tmp_path / f"{sync}.parquet"),
    )
    planned, resumed, alone = (
        pickle.loads((tmp_path / f"{name}.pickle").read_bytes()) for name in ("planned", "resumed", "alone")
    )
    assert isinstance(planned, Trained)
    assert len(planned.norms) == 3
    assert worst_difference(planned, alone) <= 2e-6
    assert len(resumed.norms) == 2
    assert worst_difference(resumed, alone.since(1)) <= 2e-6
