from __future__ import annotations

import json
from pathlib import Path

import pytest

from fcp_cli.errors import RunError
from fcp_cli.plan.reader import PlanReader
from fcp_cli.report.watch import RunState, RunTail, run_view
from tests.report.runs import make_example_plan, measured, run_record, write_run


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path)
    return path


@pytest.fixture
def lines(plan: Path, tmp_path: Path) -> list[str]:
    """The run record and four steps."""
    return write_run(tmp_path / "whole.jsonl", plan).read_text().splitlines(keepends=True)


def state_of(path: Path) -> RunState:
    state = RunState()
    for record in RunTail(path).poll():
        state.feed(record)
    return state


def test_only_whole_new_lines_are_given(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = RunTail(path)
    assert tail.poll() == []
    path.write_text(lines[0] + lines[1] + lines[2][:50])
    assert [record["kind"] for record in tail.poll()] == ["run", "step"]
    assert tail.poll() == []
    with path.open("a") as file:
        file.write(lines[2][50:])
    assert [record["step"] for record in tail.poll()] == [1]


def test_a_replaced_file_is_read_from_its_top(lines: list[str], tmp_path: Path) -> None:
    path, new = tmp_path / "metrics.jsonl", tmp_path / "new.jsonl"
    path.write_text("".join(lines[:3]))
    tail = RunTail(path)
    assert len(tail.poll()) == 3
    new.write_text("".join(lines[:2]))
    new.replace(path)
    assert [record.get("step") for record in tail.poll()] == [None, 0]


def test_damaged_lines_are_passed_over(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines[0] + "garbage\n" + '{"kind":"step","step":1}\n' + lines[3])
    assert [record.get("step") for record in RunTail(path).poll()] == [None, 2]


def test_of_a_long_run_only_the_last_steps_are_read(plan: Path, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = json.loads(lines[2])
    many = [json.dumps({**step, "step": i}, separators=(",", ":")) + "\n" for i in range(100)]
    path.write_text(lines[0] + "".join(many))
    assert [record.get("step") for record in RunTail(path).poll()] == [None, *range(80, 100)]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss":1}\n')
    with pytest.raises(RunError, match="is not the metrics of a run"):
        RunTail(tmp_path / "metrics.jsonl").poll()


def test_the_state_leaves_warm_up_out_of_rates(plan: Path, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines[:3]))
    state = state_of(path)
    second = json.loads(lines[2])
    assert not state.finished
    assert state.mean("seconds") == second["seconds"]
    assert state.seconds_left == pytest.approx(2 * second["seconds"])
    assert state.idle_of_ranks()[3] == pytest.approx(second["ranks"][3]["idle_seconds"] / second["seconds"])


def test_a_run_is_finished_after_its_last_step(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    state = state_of(path)
    assert state.finished
    assert state.seconds_left == 0
    assert len(state.to_json()["idle_of_ranks"]) == 8


def test_a_finished_run_is_not_said_to_be_stuck(lines: list[str], tmp_path: Path) -> None:
    from rich.console import Console

    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(run_view(state_of(tmp_path / "metrics.jsonl"), quiet_seconds=1e6, ascii_only=False))
    assert "finished" in capture.get()
    assert "no new step" not in capture.get()


def test_a_resumed_run_counts_from_its_latest_start(plan: Path, tmp_path: Path) -> None:
    reader = PlanReader(plan)
    steps = [measured(step, 8).record() for step in reader.steps()]
    first, second = (run_record(reader.metadata, plan, steps=steps) for steps in (2, 4))
    path = write_run(tmp_path / "metrics.jsonl", plan, records=[first, *steps[:2], second, steps[2]])
    state = state_of(path)
    assert (state.steps, state.finished, len(state.window)) == (4, False, 1)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_view_fits_80_columns(lines: list[str], tmp_path: Path, ascii_only: bool) -> None:
    from rich.console import Console

    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines[:4]))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(run_view(state_of(path), quiet_seconds=600.0, ascii_only=ascii_only))
    text = capture.get()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.isascii() == ascii_only
    for part in (
        "step       3/4",
        "loss       4.8000",
        "tokens/s",
        "planned",
        "no new step for 10:00",
        "idle per rank",
    ):
        assert part in text
