from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from tests.commands import planning_folder
from tests.report.edited_plans import change_column, edited
from tests.report.runs import make_example_plan, write_run


def fcp(*arguments: object) -> subprocess.CompletedProcess[str]:
    return planning_folder.fcp(*map(str, arguments), cwd=Path.cwd())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path)
    return path


def categories(path: Path) -> set[str]:
    return {event["cat"] for event in json.loads(path.read_text())["traceEvents"] if "cat" in event}


def test_a_plan_and_its_run_stand_side_by_side(plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", plan)
    result = fcp("trace", plan, run, "-o", tmp_path / "trace.json")
    assert result.returncode == 0, result.stderr
    assert categories(tmp_path / "trace.json") == {"planned", "measured"}
    assert "ui.perfetto.dev" in result.stderr
    assert result.stdout == ""


def test_a_run_alone_is_drawn_without_its_plan(plan: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "metrics.jsonl", plan)
    assert fcp("trace", tmp_path, "-o", tmp_path / "trace.json").returncode == 0
    assert categories(tmp_path / "trace.json") == {"measured"}


def test_steps_can_be_chosen_and_the_trace_compressed(plan: Path, tmp_path: Path) -> None:
    assert fcp("trace", plan, "--steps", "1:3", "-o", tmp_path / "trace.json.gz").returncode == 0
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1] == ["step 1", "step 2"]


def test_a_dash_writes_to_standard_output(plan: Path) -> None:
    result = fcp("trace", plan, "--steps", "0", "-o", "-")
    assert json.loads(result.stdout)["traceEvents"]
    assert result.stderr == ""


def test_what_was_written_is_one_json_document(plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", plan)
    result = fcp("trace", plan, run, "--steps", "1:3", "-o", tmp_path / "trace.json", "--json")
    document = json.loads(result.stdout)
    assert document["bytes"] == (tmp_path / "trace.json").stat().st_size
    assert document["events"] == len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert (document["steps"], document["metrics"], document["warnings"]) == (2, str(run), [])
    refused = fcp("trace", plan, "-o", "-", "--json")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--json and -o - both want stdout" in refused.stderr


def test_an_edited_plan_is_drawn_with_a_warning(plan: Path, tmp_path: Path) -> None:
    path = edited(plan, tmp_path / "plan.parquet", change_column("seconds", lambda seconds: seconds * 0.9))
    result = fcp("trace", path, "-o", tmp_path / "trace.json")
    assert result.returncode == 0
    assert result.stderr.splitlines()[0].startswith(f"warning: {path} was edited: ")
    assert categories(tmp_path / "trace.json") == {"planned"}


def test_a_trace_never_replaces_what_it_is_drawn_from(plan: Path) -> None:
    before = plan.read_bytes()
    result = fcp("trace", plan, "-o", plan)
    assert (result.returncode, plan.read_bytes()) == (2, before)
    assert "would overwrite the source; name another file with -o" in result.stderr


def test_the_metrics_of_another_plan_are_named_and_left_out(plan: Path, tmp_path: Path) -> None:
    make_example_plan(tmp_path / "other.parquet", seed=1)
    run = write_run(tmp_path / "metrics.jsonl", tmp_path / "other.parquet")
    result = fcp("trace", plan, run, "-o", tmp_path / "trace.json")
    assert result.returncode == 0
    assert "is of another plan" in result.stderr.splitlines()[0]
    assert categories(tmp_path / "trace.json") == {"planned"}


def test_truncated_metrics_are_drawn_as_far_as_they_go(plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", plan)
    run.write_text(run.read_text()[:-50])
    result = fcp("trace", run, "-o", tmp_path / "trace.json")
    assert result.returncode == 0
    assert "line 5 cut short or damaged; left out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["gone.parquet"], 1, "there is no plan gone.parquet"),
        (["gone.jsonl"], 1, "gone.jsonl does not exist; name the folder"),
        (["PLAN", "PLAN"], 2, "give one plan, the metrics of one run, or one of each"),
        (["PLAN", "--steps", "9:"], 2, "has steps 0 to 3, not --steps 9:"),
        (["PLAN", "--steps", "b"], 2, "--steps is 'b'; write A:B"),
        (["PLAN", "-o", "nowhere/trace.json"], 1, "there is no folder nowhere"),
    ],
)
def test_mistakes_get_one_line(plan: Path, arguments: list[str], status: int, message: str) -> None:
    result = fcp("trace", *(str(plan) if argument == "PLAN" else argument for argument in arguments))
    assert result.returncode == status
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_empty_run_leaves_no_file(plan: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "metrics.jsonl", plan)
    run.write_text(run.read_text().splitlines()[0] + "\n")
    result = fcp("trace", run, "-o", tmp_path / "trace.json")
    assert result.returncode == 1
    assert "there are no steps to draw: " in result.stderr
    assert "has no finished steps yet" in result.stderr
    assert list(tmp_path.glob("*trace*")) == []
