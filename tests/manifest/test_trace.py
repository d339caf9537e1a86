"""A trace of rollouts has its rows in the order of training; its batches are planned and compared as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import fcp
from tests.planning.examples import PROFILE

ROWS, SIZE = 23, 6
SETTINGS = ("--ranks", "4", "--ranks-per-node", "4", "--tokens-per-rank", "4096", "--profile", "profile.yaml")
IN_ORDER = ("--no-shuffle", "--global-batch-size", str(SIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(0).integers(100, 6000, ROWS)
    pq.write_table(pa.table({"length": lengths}), tmp_path / "trace.parquet")
    (tmp_path / "profile.yaml").write_text(PROFILE)
    return tmp_path


def test_a_plan_of_a_trace_has_its_batches(folder: Path) -> None:
    planned = fcp("plan", "trace.parquet", *SETTINGS, *IN_ORDER, "-o", "plan.parquet", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    steps = list(PlanReader(folder / "plan.parquet").steps())
    assert [sorted(step.sequences.tolist()) for step in steps] == [
        list(range(first, min(first + SIZE, ROWS))) for first in range(0, ROWS, SIZE)
    ]
    assert list(check_plan(folder / "plan.parquet", manifest=read_manifest(folder / "trace.parquet"))) == []


def test_strategies_are_compared_on_the_batches_of_a_trace_in_training_and_forward(folder: Path) -> None:
    seconds = []
    for phase in ("training", "forward"):
        options = (*IN_ORDER, "--solvers", "fcp,static", "--phase", phase, "--steps", "3")
        found = fcp("compare", "trace.parquet", *SETTINGS, *options, "--json", cwd=folder)
        assert found.returncode == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["steps"] == 3
        outcome = next(one for one in document["strategies"] if one["name"] == "fcp")["outcomes"]["iteration"]
        seconds.append(outcome["step_seconds"])
    assert seconds[0] / 4 < seconds[1] < seconds[0] / 2
