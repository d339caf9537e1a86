"""Lightning's Fabric and Trainer under a plan train as plain PyTorch does in one process on the same global batches."""

from __future__ import annotations

import pickle
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.plan.metadata.plan_metadata import Sync
from tests.runtime.launch import torchrun
from tests.runtime.loops.cases import NUM_RANKS, SYNCS, Trained, trained_by_torch, worst_difference, write_plans

pytestmark = pytest.mark.loops
pytest.importorskip("lightning", reason="Lightning is not installed")


@cache
def left() -> dict[str, Any]:
    """Case-rank -> what it left; case of the sync -> what one process computes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_plans(folder)
        torchrun("-m", "tests.runtime.workers.lightning_worker", name, num_ranks=NUM_RANKS)
        found = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pickle")}
        return found | {sync: trained_by_torch(folder / f"{sync}.parquet") for sync in SYNCS}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("loop", ["fabric", "trainer"])
def test_a_loop_trains_as_one_process_does(loop: str, sync: Sync) -> None:
    for rank in range(NUM_RANKS):
        found: Trained = left()[f"{loop} {sync}-{rank}"]
        assert worst_difference(found, left()[sync]) <= 2e-6


def test_a_trainer_resumed_inside_its_epoch_goes_on_as_if_it_had_not_stopped() -> None:
    for rank in range(NUM_RANKS):
        found: Trained = left()[f"resumed-{rank}"]
        assert len(found.losses) == 2
        assert worst_difference(found, left()["iteration"].since(1)) <= 2e-6


def test_a_loader_that_fetches_ahead_is_named_as_that() -> None:
    for rank in range(NUM_RANKS):
        message = left()[f"prefetched-{rank}"]
        assert re.search(r"^step 0: the next step was fetched before any of its \d micro-batches was run, as", message)
