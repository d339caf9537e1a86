from __future__ import annotations

import io
from typing import Any

from inline_snapshot import snapshot
from rich.console import Console

from fcp_cli.runs.metrics import RunRecord
from fcp_cli.training.progress import TrainingProgress, progress_line
from fcp_cli.util.words import clock, short_count


def run(steps: int) -> RunRecord:
    return {"kind": "run", "num_ranks": 2, "ranks_per_node": 2, "steps": steps, "first_step": 0}


def step(number: int, *, loss: float | None = 2.34567) -> Any:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "tokens": 12_345,
        "seconds": 2.0,
        "predicted_seconds": 1.75,
        "idle_fraction": 0.123,
        "warm_up": number == 0,
    }


def shown(console: Console, *, steps: int, every: int) -> str:
    progress = TrainingProgress(console, every=every)
    progress.feed(run(steps))
    for number in range(steps):
        progress.feed(step(number))
    progress.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_line_says_everything_in_80_columns() -> None:
    line = progress_line(step(997), steps=999, seconds_left=3599.0)
    assert line == snapshot("step 998/999  loss 2.3457  6.17k tok/s  2.00s (plan 1.75)  idle 12%  59:59 left")
    assert len(line) <= 80


def test_the_share_of_the_peak_and_the_memory_come_last() -> None:
    record: Any = {**step(1), "mfu": 0.4123, "peak_memory_bytes": 71_300_000_000}
    assert progress_line(record, steps=2, seconds_left=3.0).endswith("idle 12%  0:03 left  MFU 41%  71.3 GB")


def test_an_evaluation_is_a_line_of_its_own_above_the_steps() -> None:
    buckets = [{"up_to_tokens": 512, "tokens": 2000, "loss": 2.5}, {"up_to_tokens": 4096, "tokens": 9000, "loss": None}]
    record: Any = {"kind": "eval", "step": 4, "loss": 2.25, "tokens": 11_000, "seconds": 1.5, "buckets": buckets}
    console = Console(file=io.StringIO(), width=80)
    progress = TrainingProgress(console)
    progress.feed(run(9))
    progress.feed(record)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == snapshot(
        "evaluation 5/9  loss 2.2500 of 11k tokens  up to 512: 2.5000  up to 4,096: nan  1.50s\n"
    )


def test_a_loss_that_ran_away_is_shown_as_nan() -> None:
    assert "loss nan" in progress_line(step(1, loss=None), steps=2, seconds_left=None)


def test_through_a_pipe_there_are_plain_lines_for_the_first_every_nth_and_the_last_step() -> None:
    text = shown(Console(file=io.StringIO(), width=80), steps=12, every=5)
    assert [line.split("  ")[0] for line in text.splitlines()] == ["step 1/12", "step 5/12", "step 10/12", "step 12/12"]
    assert "\x1b" not in text


def test_time_left_leaves_out_the_warm_up_step() -> None:
    lines = shown(Console(file=io.StringIO(), width=80), steps=3, every=1).splitlines()
    assert "left" not in lines[0]
    assert lines[1].endswith("0:02 left")


def test_on_a_terminal_one_line_is_drawn_over_and_the_last_stays() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    text = shown(console, steps=3, every=100)
    assert text.count("step 3/3") >= 1
    assert "\x1b[2K" in text  # the line before was erased


def test_short_forms() -> None:
    assert [short_count(number) for number in (12, 1234, 5_600_000)] == ["12", "1.23k", "5.6M"]
    assert [clock(seconds) for seconds in (0.4, 61, 3600)] == ["0:00", "1:01", "1:00:00"]
