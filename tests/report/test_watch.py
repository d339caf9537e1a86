from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.report.watch import WINDOW_STEPS, RunState, run_view
from fcp_cli.runs.metrics_reader import MetricsTail
from fcp_cli.runs.owner import End, Owner
from tests.report.runs import measured, run_record, write_run


@pytest.fixture
def lines(example_plan: Path, tmp_path: Path) -> list[str]:
    """The run record and four steps."""
    return write_run(tmp_path / "whole.jsonl", example_plan).read_text().splitlines(keepends=True)


def state_of(path: Path) -> RunState:
    state = RunState()
    for record in MetricsTail(path, joins_with=WINDOW_STEPS).poll():
        state.feed(record)
    return state


def test_a_replaced_file_is_read_from_its_top(lines: list[str], tmp_path: Path) -> None:
    path, new = tmp_path / "metrics.jsonl", tmp_path / "new.jsonl"
    path.write_text("".join(lines[:3]))
    tail = MetricsTail(path, joins_with=WINDOW_STEPS)
    assert len(tail.poll()) == 3
    new.write_text("".join(lines[:2]))
    new.replace(path)
    assert [record.get("step") for record in tail.poll()] == [None, 0]


def test_of_a_long_run_only_the_last_steps_are_read(example_plan: Path, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    step = json.loads(lines[2])
    many = [json.dumps({**step, "step": i}, separators=(",", ":")) + "\n" for i in range(100)]
    path.write_text(lines[0] + "".join(many))
    assert [record.get("step") for record in MetricsTail(path, joins_with=WINDOW_STEPS).poll()] == [
        None,
        *range(80, 100),
    ]


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"loss":1}\n')
    with pytest.raises(RunError, match="is not the metrics of a run"):
        MetricsTail(tmp_path / "metrics.jsonl").poll()


def test_the_state_leaves_warm_up_out_of_rates(example_plan: Path, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines[:3]))
    state = state_of(path)
    second = json.loads(lines[2])
    assert not state.finished
    assert state.mean("seconds") == second["seconds"]
    assert state.seconds_left == pytest.approx(2 * second["seconds"])
    assert state.idle_of_ranks()[3] == pytest.approx(second["ranks"][3]["idle_seconds"] / second["seconds"])


def test_drift_and_a_slow_rank_are_named(lines: list[str]) -> None:
    from rich.console import Console

    state = RunState()
    state.feed(json.loads(lines[0]))
    for number in range(12):
        record = json.loads(lines[1 + number % 4]) | {"step": number, "warm_up": False}
        record["seconds"] = record["predicted_seconds"] * (1.0 if number < 6 else 1.2)
        for rank in record["ranks"]:
            for one in rank["micro_batches"]:
                one["degree"] = 1
                one["seconds"] = one["predicted_seconds"] * (1.43 if rank["rank"] == 1 else 1.0)
        state.feed(record)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(run_view(state, None, ascii_only=True))
    assert "drift      measured / planned went from x1.000 to x1.200" in capture.get()
    assert "slow       rank 1 x1.43" in capture.get()
    assert state.to_json("running")["slow_ranks"] == {"1": pytest.approx(1.43)}


def test_a_run_is_finished_after_its_last_step(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    state = state_of(path)
    assert state.finished
    assert state.seconds_left == 0
    assert len(state.to_json("finished")["idle_of_ranks"]) == 8


def owner(*, pid: int | None = None, **changes: Any) -> Owner:
    """This very process, alive and well, or one of another number."""
    found = replace(Owner.this_process(""), since="2026-01-01T00:00:00+00:00", age_seconds=1.0)
    if pid is not None and found.process is not None:
        found = replace(found, pid=pid, process=replace(found.process, pid=pid))
    return replace(found, **changes)


def test_a_finished_run_is_not_shown_as_stuck(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    state = state_of(tmp_path / "metrics.jsonl")
    assert state.standing(None, quiet_seconds=1e6) == "finished"
    assert state.remark("finished", None, quiet_seconds=1e6) is None


def test_a_slow_step_is_distinguished_from_a_dead_run(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    state = state_of(tmp_path / "metrics.jsonl")
    slow = owner()
    assert state.standing(slow, quiet_seconds=1e5) == "running"
    remark = state.remark("running", slow, quiet_seconds=1e5)
    assert remark == "no new step for 27:46:40: its launcher is running"
    killed = owner(pid=2**22 + 1, age_seconds=20.0)
    quiet = max(60.0, 5.0 * state.mean("seconds")) + 1.0
    assert state.standing(killed, quiet_seconds=quiet) == "gone"
    remark = state.remark("gone", killed, quiet_seconds=quiet)
    assert remark == (
        f"dead after step 2 of 4: its launcher on {socket.gethostname()} is gone, last heartbeat 0:20 ago"
    )


def test_ranks_that_go_on_without_their_launcher_are_watched_on(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    state = state_of(tmp_path / "metrics.jsonl")
    killed = owner(pid=2**22 + 1, age_seconds=500.0)
    assert state.standing(killed, quiet_seconds=2.0) == "running"
    assert "its ranks may keep training" in str(state.remark("running", killed, quiet_seconds=2.0))


@pytest.mark.parametrize(("age_seconds", "standing"), [(100.0, "running"), (130.0, "gone")])
def test_a_launcher_on_another_machine_is_judged_by_its_owner(age_seconds: float, standing: str) -> None:
    elsewhere = owner(process=None, host="elsewhere", age_seconds=age_seconds)
    assert RunState().standing(elsewhere, quiet_seconds=0.0) == standing


def test_a_later_process_with_the_launchers_number_is_not_taken_for_it() -> None:
    here = owner(age_seconds=60.0)
    assert here.process is not None
    assert replace(here, process=replace(here.process, started_ticks=1)).is_gone
    assert not here.is_gone


@pytest.mark.parametrize(
    ("ended", "remark"),
    [
        ("interrupted", "interrupted after step 2 of 4"),
        ("failed", "failed after step 2 of 4; see the output of its ranks in its folder logs"),
    ],
)
def test_how_a_run_ended_is_shown(lines: list[str], tmp_path: Path, ended: End, remark: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    state = state_of(tmp_path / "metrics.jsonl")
    standing = state.standing(owner(ended=ended), quiet_seconds=0.0)
    assert (standing, state.remark(standing, None, quiet_seconds=0.0)) == (ended, remark)


def test_without_a_launcher_a_run_is_given_up_after_long_silence(lines: list[str], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    state = state_of(tmp_path / "metrics.jsonl")
    assert state.standing(None, quiet_seconds=299.0) == "running"
    limit = max(300.0, 20 * state.mean("seconds"))
    assert state.standing(None, quiet_seconds=limit + 1) == "silent"
    assert "probably dead after step 2 of 4" in str(state.remark("silent", None, quiet_seconds=limit + 1))


def test_a_finished_run_that_is_started_again_is_running(lines: list[str], tmp_path: Path) -> None:
    """Until its ranks have written, the metrics are those of the start before."""
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    state = state_of(tmp_path / "metrics.jsonl")
    assert state.standing(owner(since="2026-01-02T00:00:00+00:00"), quiet_seconds=0.0) == "running"


def test_a_resumed_run_counts_from_its_latest_start(example_plan: Path, tmp_path: Path) -> None:
    reader = PlanReader(example_plan)
    steps = [measured(step, 8) for step in reader.steps()]
    first, second = (run_record(reader.metadata, example_plan, steps=steps) for steps in (2, 4))
    path = write_run(tmp_path / "metrics.jsonl", example_plan, records=[first, *steps[:2], second, steps[2]])
    state = state_of(path)
    assert (state.steps, state.finished, len(state.window)) == (4, False, 1)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_view_fits_80_columns(lines: list[str], tmp_path: Path, ascii_only: bool) -> None:
    from rich.console import Console

    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines[:4]))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(run_view(state_of(path), "no new step for 10:00: its launcher is running", ascii_only=ascii_only))
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


def test_a_script_whose_model_nobody_named_is_shown_by_its_own_name(lines: list[str], tmp_path: Path) -> None:
    from rich.console import Console

    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({**json.loads(lines[0]), "model": None, "program": "/home/me/train.py"}) + "\n")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(run_view(state_of(path), None, ascii_only=True))
    assert capture.get().startswith("train.py on ")
