"""A trace of rollouts says which step each row was in; its batches are planned and compared as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file.reader import PlanReader
from tests.commands.planning_folder import fcp
from tests.messages import raises
from tests.planning.examples import PROFILE

SIZES = [5, 9, 2, 7]
SETTINGS = ("--ranks", "4", "--ranks-per-node", "4", "--tokens-per-rank", "4096", "--profile", "profile.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(0).integers(100, 6000, sum(SIZES))
    steps = np.repeat([10, 11, 13, 40], SIZES)
    pq.write_table(pa.table({"length": lengths, "rollout_step": steps}), tmp_path / "trace.parquet")
    lines = [{"length": int(length), "rollout_step": int(step)} for length, step in zip(lengths, steps, strict=True)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "profile.yaml").write_text(PROFILE)
    return tmp_path


def test_lines_and_columns_are_the_same_trace(folder: Path) -> None:
    found = [read_manifest(folder / f"trace.{kind}", step_column="rollout_step") for kind in ("parquet", "jsonl")]
    assert found[0].steps is not None and found[1].steps is not None
    assert found[0].steps.tolist() == found[1].steps.tolist() == np.repeat([10, 11, 13, 40], SIZES).tolist()
    assert found[0].content_hash() == found[1].content_hash() == read_manifest(folder / "trace.parquet").content_hash()


def test_a_plan_of_a_trace_has_its_batches(folder: Path) -> None:
    planned = fcp("plan", "trace.jsonl", *SETTINGS, "--step-column", "rollout_step", "-o", "plan.parquet", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    reader = PlanReader(folder / "plan.parquet")
    assert [len(step.sequences) for step in reader.steps()] == SIZES
    assert sorted(np.concatenate([step.sequences for step in reader.steps()])) == list(range(sum(SIZES)))
    assert reader.metadata.batching is not None and reader.metadata.batching.by == "given"
    assert list(check_plan(folder / "plan.parquet", manifest=read_manifest(folder / "trace.parquet"))) == []


def test_strategies_are_compared_on_the_batches_of_a_trace_in_training_and_forward(folder: Path) -> None:
    seconds = []
    for phase in ("training", "forward"):
        options = ("--step-column", "rollout_step", "--solvers", "fcp,static", "--phase", phase, "--steps", "3")
        found = fcp("compare", "trace.parquet", *SETTINGS, *options, "--json", cwd=folder)
        assert found.returncode == 0, found.stderr
        document = json.loads(found.stdout)
        assert document["steps"] == 3
        outcome = next(one for one in document["strategies"] if one["name"] == "fcp")["outcomes"]["iteration"]
        seconds.append(outcome["step_seconds"])
    assert seconds[0] / 4 < seconds[1] < seconds[0] / 2


def test_a_trace_that_is_none_is_one_line(folder: Path) -> None:
    with raises(
        "ManifestError: FOLDER/trace.parquet has no column 'step'; its columns are length, rollout_step; name the one "
        "with the step of each row with --step-column"
    ):
        read_manifest(folder / "trace.parquet", step_column="step")
    pq.write_table(pa.table({"length": [5, 6, 7], "step": [1, 3, 2]}), folder / "falling.parquet")
    with raises("ManifestError: falling.parquet: row 2 has step 2 in column 'step', after step 3; sort the rows by it"):
        read_manifest(folder / "falling.parquet", step_column="step")
    pq.write_table(pa.table({"length": [5], "step": ["a"]}), folder / "texts.parquet")
    with raises("ManifestError: FOLDER/texts.parquet: column 'step' is string; the step of a row must be an integer"):
        read_manifest(folder / "texts.parquet", step_column="step")
    (folder / "lines.jsonl").write_text('{"length": 5}')
    with raises(
        "ManifestError: line 1 of FOLDER/lines.jsonl has no 'step'; its keys are length; name the one with the step of "
        "each line with --step-column"
    ):
        read_manifest(folder / "lines.jsonl", step_column="step")


def test_two_rules_for_batches_are_refused(folder: Path) -> None:
    both = fcp(
        "plan", "trace.parquet", *SETTINGS, "--step-column", "rollout_step", "--global-batch-size", "4", cwd=folder
    )
    assert both.returncode == 2
    assert "--step-column and --global-batch-size both say what a step trains; give one of them" in both.stderr
