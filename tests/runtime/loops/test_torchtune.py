"""torchtune's models train under a plan as alone."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from fcp_cli.plan.metadata.plan_metadata import Sync
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.loops.cases import NUM_RANKS, SYNCS, Trained, worst_difference, write_plans

pytestmark = pytest.mark.loops
pytest.importorskip("torchtune", reason="torchtune is not installed")


@pytest.mark.parametrize("sync", SYNCS)
def test_the_example_trains_as_torchtune_does_alone(sync: Sync, tmp_path: Path) -> None:
    write_plans(tmp_path)
    torchrun(
        "-m",
        "tests.runtime.workers.torchtune_worker",
        str(ROOT / "examples" / "torchtune" / "train.py"),
        str(tmp_path),
        num_ranks=NUM_RANKS,
        FCP_PLAN=str(tmp_path / f"{sync}.parquet"),
    )
    planned, alone = (pickle.loads((tmp_path / f"{name}.pickle").read_bytes()) for name in ("planned", "alone"))
    assert isinstance(planned, Trained)
    assert len(planned.norms) == 3
    assert worst_difference(planned, alone) <= 2e-6
