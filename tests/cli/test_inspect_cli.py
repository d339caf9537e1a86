"""`fcp inspect` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import EIGHT_RANKS, assert_one_error_line, fcp, fcp_process, write_dataset
from tests.report.edited_plans import change_column, edited


@pytest.fixture(scope="module", params=["iteration", "microbatch"])
def planned(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = write_dataset(tmp_path_factory.mktemp("inspect"))
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--sync", request.param, "--json", cwd=folder)
    (folder / "summary.json").write_text(result.stdout)
    return folder


def test_the_summary_is_that_of_planning(planned: Path) -> None:
    result = fcp("inspect", "--json", cwd=planned)
    document = json.loads(result.stdout)
    summary = json.loads((planned / "summary.json").read_text())
    for key in ("plan_hash", "steps", "tokens", "gap", "idle_fraction", "degrees", "speedup_over_static"):
        assert document[key] == pytest.approx(summary[key]) if key != "degrees" else document[key] == summary[key]


def test_the_summary_fits_80_columns(planned: Path) -> None:
    result = fcp("inspect", cwd=planned)
    assert (result.returncode, result.stderr) == (0, "")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    for label in ("gap", "idle", "degree", "over the best static plan"):
        assert label in result.stdout


def test_one_step_is_a_table_of_microbatches_and_ranks(planned: Path) -> None:
    result = fcp("inspect", "--step", "1", cwd=planned)
    assert (result.returncode, result.stderr) == (0, "")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    step = next(PlanReader(planned / "plan.parquet").steps(1))
    working = [row for row in step.microbatches() if not row.is_idle]
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == len(working) + 8
    assert all(cells[0] == str(row.order) for cells, row in zip(rows, working, strict=False))
    assert f"{step.makespan_seconds:.4g} s" in result.stdout


def test_one_step_as_json_has_every_row(planned: Path) -> None:
    document = json.loads(fcp("inspect", "--step", "2", "--json", cwd=planned).stdout)
    step = next(PlanReader(planned / "plan.parquet").steps(2))
    assert document["step"] == 2
    assert [tuple(row["ranks"]) for row in document["micro_batches"]] == [row.ranks for row in step.microbatches()]
    assert [row["tokens"] for row in document["micro_batches"]] == step.tokens.tolist()
    assert len(document["busy_seconds"]) == 8


def test_a_step_that_is_not_there_is_wrong_usage(planned: Path) -> None:
    error = assert_one_error_line(fcp("inspect", "--step", "4", cwd=planned), 2)
    assert "plan.parquet has steps 0 to 3, not --step 4" in error


@pytest.mark.processes
def test_the_tables_are_plain_ascii_where_the_terminal_is(planned: Path) -> None:
    result = fcp_process("inspect", cwd=planned, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert result.returncode == 0
    assert result.stdout.isascii()


def test_an_edited_plan_is_shown_with_a_warning(planned: Path, tmp_path: Path) -> None:
    edited(planned / "plan.parquet", tmp_path / "edited.parquet", change_column("seconds", lambda t: 0.9 * t))
    for arguments in ([], ["--step", "1"]):
        result = fcp("inspect", "edited.parquet", *arguments, cwd=tmp_path)
        assert result.returncode == 0
        assert result.stderr.splitlines()[-1].startswith("warning: edited.parquet was edited: ")
        document = json.loads(fcp("inspect", "edited.parquet", *arguments, "--json", cwd=tmp_path).stdout)
        assert len(document["warnings"]) == 1


def test_a_name_that_the_system_refuses_is_one_short_line(tmp_path: Path) -> None:
    error = assert_one_error_line(fcp("inspect", "k" * 5000, cwd=tmp_path), 1)
    assert error.startswith("error: cannot use kkkk")
    assert error.endswith("kkkk: File name too long")
    assert len(error) < 1300


@pytest.mark.lengthy
def test_plans_that_split_heads_show_the_shapes_of_their_groups(tmp_path: Path) -> None:
    lengths = [131_072, 40_000, 40_000, *[3_000] * 13]
    pq.write_table(pa.table({"length": lengths}), tmp_path / "dataset.parquet")
    fcp("profile", "--analytic", "--model", "qwen3-8b", "--cluster", "h100-8x8", "-o", "profile.yaml", cwd=tmp_path)
    ranks = ("--ranks", "16", "--ranks-per-node", "8", "--tokens-per-rank", "16384", "--global-batch-size", "16")
    result = fcp("plan", "dataset.parquet", *ranks, "--attention", "2d", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    step = next(PlanReader(tmp_path / "plan.parquet").steps(0))
    widest = max(step.microbatches(), key=lambda row: row.degree)
    assert widest.heads_degree > 1
    table = fcp("inspect", cwd=tmp_path).stdout
    assert "heads x ring" in table and f"{widest.heads_degree} x {widest.ring_degree}: 1" in table
    assert max(map(len, table.splitlines())) <= 80
    totals = json.loads(fcp("inspect", "--json", cwd=tmp_path).stdout)["degrees"][str(widest.degree)]
    assert totals["heads_degrees"][str(widest.heads_degree)] == 1
    assert fcp("report", "plan.parquet", "-o", "page.html", cwd=tmp_path).returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "<th>heads x ring</th>" in page and "ranks that share heads" in page
