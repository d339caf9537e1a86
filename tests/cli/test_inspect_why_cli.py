"""`fcp inspect --step N --why GROUP` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import assert_one_error_line, fcp
from tests.report.runs import make_example_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("why")
    make_example_plan(folder / "plan.parquet")
    return folder


def test_a_group_is_explained_in_80_columns(folder: Path) -> None:
    row = next(
        row for step in PlanReader(folder / "plan.parquet").steps() for row in step.microbatches() if 1 < row.degree < 8
    )
    result = fcp("inspect", "--step", str(row.step), "--why", str(row.order), cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any(line.split()[:2] == [">", str(row.degree)] for line in lines)
    assert f"not {row.degree - 1}: " in result.stdout
    assert f"not {row.degree + 1}: " in result.stdout


def test_the_explanation_as_json_has_the_neighbours(folder: Path) -> None:
    document = json.loads(fcp("inspect", "--step", "0", "--why", "0", "--json", cwd=folder).stdout)
    degrees = [alternative["degree"] for alternative in document["alternatives"]]
    assert document["degree"] in degrees
    assert {reason["bound"] for reason in document["reasons"]} <= {"memory", "balance", "topology", "ranks"}


def test_a_group_without_a_step_is_wrong_usage(folder: Path) -> None:
    assert "give --step too" in assert_one_error_line(fcp("inspect", "--why", "0", cwd=folder), 2)


def test_a_group_that_is_not_there_is_wrong_usage(folder: Path) -> None:
    error = assert_one_error_line(fcp("inspect", "--step", "0", "--why", "999", cwd=folder), 2)
    assert "step 0 has micro-batches 0 to" in error
