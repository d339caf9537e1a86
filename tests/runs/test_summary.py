from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.runs.metrics_reader import RunSummary, closing_line, summary_of
from fcp_cli.runs.run_dir import RunPaths


def step(number: int, *, loss: float | None, seconds: float) -> Any:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "tokens": 60_000,
        "seconds": seconds,
        "predicted_seconds": 2.0,
        "idle_fraction": 0.1,
        "warm_up": number == 0,
        "ranks": [],
    }


def test_the_closing_line_says_what_a_run_came_to_and_where_everything_is(tmp_path: Path) -> None:
    paths = RunPaths(run_dir=tmp_path)
    header = paths.checkpoints / "step-00000003" / "checkpoint.json"
    header.parent.mkdir(parents=True)
    header.write_text("{}")
    ran = RunSummary()
    for number, seconds in enumerate((90.0, 2.2, 2.0)):
        ran.feed(step(number, loss=5.5 - number, seconds=seconds))
    line = closing_line(ran, paths).replace(str(tmp_path), "RUN")
    assert line == snapshot(
        "done: steps 1 to 3, loss 5.5000 -> 3.5000, 180k tokens in 94.2 s; a step took 2.1 s, planned 2 s (x1.05); "
        "checkpoint RUN/checkpoints/step-00000003, metrics RUN/metrics.jsonl"
    )


def test_a_plan_of_computed_times_is_not_held_against_the_run_but_its_predicted_gain_is_named(tmp_path: Path) -> None:
    paths = RunPaths(run_dir=tmp_path)
    paths.profile.write_text("model: tiny\norigin: analytic  # computed\n")
    paths.gain.write_text("49% less than the script's own padded batches")
    ran = RunSummary()
    for number in (0, 1, 2, 0, 1):  # two trainers
        ran.feed(step(number, loss=None, seconds=3.0))
    assert closing_line(ran, paths).replace(str(tmp_path), "RUN") == (
        "done: steps 1 to 3 and 1 to 2, 300k tokens in 15 s; a step took 3 s; predicted 49% less than the script's own "
        "padded batches, metrics RUN/metrics.jsonl"
    )


def test_the_closing_line_names_the_last_saved_model_that_the_trainer_has_not_deleted(tmp_path: Path) -> None:
    paths = RunPaths(run_dir=tmp_path)
    (tmp_path / "out" / "best").mkdir(parents=True)
    paths.saved.write_text(f"{tmp_path}/out/first\n{tmp_path}/out/best\n{tmp_path}/out/deleted\n")
    line = closing_line(RunSummary(), paths).replace(str(tmp_path), "RUN")
    assert line == "done: no step was measured; model RUN/out/best, logs in RUN/logs"


def test_a_slow_run_on_busy_cores_names_their_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (30.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ran = RunSummary()
    for number in range(2):
        ran.feed(step(number, loss=None, seconds=16.0))
    assert "a step took 16 s, planned 2 s (x8.00; load 30 on 2 cores);" in closing_line(ran, RunPaths(run_dir=tmp_path))


def test_a_run_that_nobody_measured_names_its_logs(tmp_path: Path) -> None:
    line = closing_line(RunSummary(), RunPaths(run_dir=tmp_path)).replace(str(tmp_path), "RUN")
    assert line == "done: no step was measured; logs in RUN/logs"


def test_a_file_is_added_up_over_all_its_starts_without_its_damaged_lines(tmp_path: Path) -> None:
    steps = [
        step(0, loss=None, seconds=1.0),
        {"kind": "run", "num_ranks": 2, "ranks_per_node": 2},
        step(1, loss=None, seconds=3.0),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps) + '{"kind": "st')
    assert summary_of(tmp_path / "metrics.jsonl").line() == (
        "steps 1 to 2, 120k tokens in 4 s; a step took 3 s, planned 2 s (x1.50)"
    )


def test_a_run_of_its_first_step_alone_is_not_held_against_its_plan() -> None:
    ran = RunSummary()
    ran.feed(step(0, loss=None, seconds=90.0))
    assert ran.line() == ("steps 1 to 1, 60k tokens in 90 s; the last step took 90 s with its warm-up, planned 2 s")
