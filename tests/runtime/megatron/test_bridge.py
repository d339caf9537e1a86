"""Megatron-Bridge's training step under a plan, beside itself without fcp."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.runtime.launch import ROOT, torchrun
from tests.training.small_runs import run_fcp

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

SCRIPT = ROOT / "tests" / "runtime" / "megatron" / "bridge_train.py"
EAGER = {"TORCHDYNAMO_DISABLE": "1"}


@pytest.mark.parametrize("loader", ["single", "batch"])
def test_its_training_step_has_the_losses_and_weights_that_it_has_without_fcp(loader: str, tmp_path: Path) -> None:
    if not os.environ.get("FCP_MEGATRON_BRIDGE_SOURCE"):
        pytest.skip("opt-in: FCP_MEGATRON_BRIDGE_SOURCE names a checkout of Megatron-Bridge 0.6.0; megatron-core 0.19")
    draw = random.Random(1)
    lengths = [draw.choice([3, 5, 9, 17, 30, 61, 100]) for _ in range(96)]
    pq.write_table(pa.table({"length": lengths}), tmp_path / "lengths.parquet")
    options = ("--ranks", "2", "--ranks-per-node", "2", "--tokens-per-rank", "80", "--global-batch-size", "8")
    making = ("--solver", "fcp-paper", "--sync", "iteration", "--no-shuffle", "-o", "plan.parquet")
    planned = run_fcp("plan", "lengths.parquet", *options, *making, folder=tmp_path)
    assert planned.returncode == 0, planned.stderr
    torchrun(str(SCRIPT), str(tmp_path / "lengths.parquet"), str(tmp_path / "alone"), loader, num_ranks=2, **EAGER)
    words = ("launch", "--plan", "plan.parquet", "--", str(SCRIPT), "lengths.parquet", "planned", loader)
    done = run_fcp(*words, folder=tmp_path, **EAGER)
    assert done.returncode == 0, done.stderr
    assert "from step 0 of 12, 2 ranks, sync iteration" in done.stderr
    alone, found = (json.loads((tmp_path / f"{name}.0.json").read_text()) for name in ("alone", "planned"))
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-6)
    np.testing.assert_allclose(found["weights"], alone["weights"], atol=1e-6)
