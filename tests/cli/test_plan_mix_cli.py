"""`fcp plan --mix`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import EIGHT_RANKS, assert_one_error_line, fcp, write_dataset

OPTIONS = (*EIGHT_RANKS, "--solver", "static")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of small datasets: 96 sequences in `dataset.parquet`, 20 in `b.parquet`."""
    pq.write_table(pa.table({"length": list(range(100, 120))}), tmp_path / "b.parquet")
    return write_dataset(tmp_path)


def plan_hash(folder: Path, *words: str) -> str:
    result = fcp("plan", *words, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    return str(json.loads(result.stdout)["plan_hash"])


def test_a_mixture_that_cannot_be_is_one_line(folder: Path) -> None:
    for words, message in (
        (("--mix", "b.parquet:1", "dataset.parquet"), "--mix names its manifests"),
        (("--mix", "b.parquet:1", "--global-batch-tokens", "9"), "--mix counts sequences of a step"),
    ):
        result = fcp("plan", *words, "-o", "new.parquet", cwd=folder)
        assert message in assert_one_error_line(result, result.returncode)
        assert result.returncode in (1, 2)
    assert not (folder / "new.parquet").exists()


def test_a_mixture_goes_on_from_a_step_by_other_weights(folder: Path) -> None:
    mixed = ("--mix", "dataset.parquet:2", "--mix", "b.parquet:1")
    plan_hash(folder, *mixed, *OPTIONS, "-o", "plan.parquet")
    changed = ("--mix", "dataset.parquet:0", "--mix", "b.parquet:1")
    plan_hash(folder, "--continue-from", "plan.parquet@2", *changed, "--solver", "static", "-o", "rest.parquet")
    assert fcp("check", "rest.parquet", cwd=folder).returncode == 0
    rest, whole = PlanReader(folder / "rest.parquet"), PlanReader(folder / "plan.parquet")
    assert rest.metadata.continues is not None and rest.metadata.continues.plan_hash == whole.metadata.plan_hash
    steps = list(rest.steps())
    assert [step.step for step in steps] == list(range(2, whole.metadata.end_step))
    assert all((step.sequences >= 96).all() for step in steps)
    result = fcp("plan", "--continue-from", "plan.parquet@2", "--mix", "b.parquet:1", "-o", "x.parquet", cwd=folder)
    assert "the run trained dataset.parquet, which --mix does not name" in assert_one_error_line(result, 1)
