"""An unmodified MindSpeed script, started by `fcp launch -- train.py`, beside a Megatron script in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.forked_ranks import shared_by_scripts
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.mindspeed.sources import STAND_IN, real_sources
from tests.runtime.plans import Row, write_plan
from tests.training.small_runs import run_fcp

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
from tests.runtime.mindspeed.test_mindspeed import SWITCHING

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

SCRIPTS = ROOT / "tests" / "runtime"
# On two ranks, both alone and together.
OF_TWO = (
    (Row([0, 1], [7, 30]), Row([0], [5, 1]), Row([1], [13]), Row([0, 1], [41, 2, 3])),
    (Row([0], [7, 2]), Row([1], [33, 5]), Row([0, 1], [41, 2, 9]), Row([1], [8])),
    (Row([0, 1], [10, 11, 12, 13]), Row([1], [14, 15, 16, 17])),
)


def results(path: Path, rank: int) -> Any:
    return json.loads(path.with_suffix(f".{rank}.json").read_text())


def assert_same_training(folder: Path, steps: Sequence[Sequence[Row]], *sources: Path | str) -> None:
    """Train once in one process on Megatron alone, and once on MindSpeed under a plan."""
    lengths = [length for rows in steps for row in rows for length in row.lengths]
    pq.write_table(pa.table({"length": lengths}), folder / "lengths.parquet")
    num_ranks = 1 + max(rank for rows in steps for row in rows for rank in row.ranks)
    write_plan(folder / "plan.parquet", steps, num_ranks=num_ranks, rows=len(lengths))
    path = os.pathsep.join(map(str, (*sources, ROOT)))
    alone = ("-m", "tests.runtime.megatron.train", str(folder / "lengths.parquet"), str(folder / "alone"))
    torchrun(*alone, "--steps", str(len(steps)), num_ranks=1, PYTHONPATH=path)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([path, os.environ["PYTHONPATH"]]))
        script = (str(SCRIPTS / "mindspeed" / "train.py"), "lengths.parquet", "planned", "--steps", str(len(steps)))
        planned = ("launch", "--plan", "plan.parquet", "--", *script, "--context-parallel-size", "2")
        done = run_fcp(*planned, folder=folder, **shared_by_scripts())
    assert done.returncode == 0, done.stderr
    assert "sync iteration; MindSpeed of a source folder on megatron-core 0." in done.stderr
    assert ", its ring attention, 2 attention layers hooked; " in done.stderr
    counted = "padding, which the plan does not count ('fcp plan --padded-rings' does)"
    assert f"{counted}; probe: attention within " in done.stderr
    expected = results(folder / "alone", 0)
    for rank in range(num_ranks):
        found = results(folder / "planned", rank)
        for record, wanted in zip(found["records"], expected["records"], strict=True):
            assert record == pytest.approx(wanted, rel=1e-6)
        error = np.linalg.norm(np.subtract(found["weights"], expected["weights"]))
        assert error <= 1e-6 * np.linalg.norm(expected["weights"])


def test_losses_gradient_norms_and_weights_are_those_of_one_process(tmp_path: Path) -> None:
    assert_same_training(tmp_path, OF_TWO, STAND_IN)


def test_on_real_mindspeed_too_they_are_those_of_one_process(tmp_path: Path) -> None:
    assert_same_training(tmp_path, SWITCHING, *real_sources())
