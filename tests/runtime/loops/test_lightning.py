"""Lightning's Fabric and Trainer under a plan train as plain PyTorch does in one process on the same global batches."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.plan.metadata import Sync
from tests.runtime.launch import run_worker
from tests.runtime.loops.cases import NUM_RANKS, SYNCS, trained_by_torch, worst_difference, write_plans

pytestmark = pytest.mark.loops
pytest.importorskip("lightning", reason="Lightning is not installed")


@cache
def left() -> dict[str, list[Any]]:
    """Case -> what each rank left, and sync -> what one process computes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_plans(folder)
        found = run_worker("lightning_worker", folder, num_ranks=NUM_RANKS)
        return found | {sync: [trained_by_torch(folder / f"{sync}.parquet")] for sync in SYNCS}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("loop", ["fabric", "trainer"])
def test_a_loop_trains_as_one_process_does(loop: str, sync: Sync) -> None:
    for found in left()[f"{loop} {sync}"]:
        assert worst_difference(found, left()[sync][0]) <= 2e-6


def test_a_trainer_resumed_inside_its_epoch_goes_on_as_if_it_had_not_stopped() -> None:
    for found in left()["resumed"]:
        assert len(found.losses) == 2
        assert worst_difference(found, left()["iteration"][0].since(1)) <= 2e-6


def test_a_loader_that_fetches_ahead_is_named_as_that() -> None:
    for message in left()["prefetched"]:
        assert re.search(r"^step 0: the next step was fetched before any of its \d micro-batches was run, as", message)
