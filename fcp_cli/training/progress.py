"""Shows training progress: a live line on a terminal, a plain line every few steps otherwise.

Consumes metrics records, so that the trainer and `fcp watch` show the same.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from fcp_cli.runs.metrics.metrics_record import EvalRecord, MetricsRecord, StepRecord
from fcp_cli.words import clock, counted, short_count, short_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_STEPS_FOR_PACE = 20


def progress_line(record: StepRecord, *, steps: int, seconds_left: float | None) -> str:
    """Describe a step, in 80 columns for up to 1,000 steps and an hour; beyond, the end may be truncated.

    MFU, if known, and peak memory per rank come last.
    """
    seconds = record["seconds"]
    parts = [
        f"step {record['step'] + 1}/{steps}",
        f"loss {_loss(record['loss'])}",
        f"{short_count(record['tokens'] / seconds)} tok/s",
        f"{short_seconds(seconds)}s (plan {short_seconds(record['predicted_seconds'])})",
        f"idle {record['idle_fraction']:.0%}",
    ]
    if bad_rows := record.get("bad_rows"):
        parts.append(counted(len(bad_rows), "bad row"))
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    if (mfu := record.get("mfu")) is not None:
        parts.append(f"MFU {mfu:.0%}")
    if peak := record.get("peak_memory_bytes"):
        parts.append(f"{peak / 1e9:.3g} GB")
    return "  ".join(parts)


def evaluation_line(record: EvalRecord, *, steps: int) -> str:
    """Describe an evaluation: loss per trained token, in total and by sequence length."""
    parts = [
        f"evaluation {record['step'] + 1}/{steps}",
        f"loss {_loss(record['loss'])} of {short_count(record['tokens'])} tokens",
        *(f"up to {one['up_to_tokens']:,}: {_loss(one['loss'])}" for one in record["buckets"]),
        f"{short_seconds(record['seconds'])}s",
    ]
    return "  ".join(parts)


def _loss(value: float | None) -> str:
    return "nan" if value is None else format(value, ".4f")


class TrainingProgress:
    """Live display of a run. Feed it every record, and always close it.

    Args:
        console: output console.
        every: steps between plain lines; the first and last step are always printed.
    """

    def __init__(self, console: Console, *, every: int = 10) -> None:
        self._console = console
        self._every = every
        self._steps = 0
        self._first_step: int | None = None
        self._pace: deque[float] = deque(maxlen=_STEPS_FOR_PACE)
        self._live: Live | None = None

    def feed(self, record: MetricsRecord) -> None:
        if record["kind"] == "run":
            self._steps = record.get("steps", 0)
            self._first_step = None
        elif record["kind"] == "step":
            self._show(record)
        elif record["kind"] == "eval":
            line = evaluation_line(record, steps=self._steps)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # printed above the live line

    def _show(self, record: StepRecord) -> None:
        if not record.get("warm_up"):
            self._pace.append(record["seconds"])
        step, pace = record["step"], self._pace
        seconds_left = (self._steps - step - 1) * sum(pace) / len(pace) if pace else None
        line = progress_line(record, steps=self._steps, seconds_left=seconds_left)
        if self._console.is_terminal:
            self._update_live(line)
        elif self._first_step is None or (step + 1) % self._every == 0 or step + 1 == self._steps:
            self._console.print(line, markup=False, soft_wrap=True)
        if self._first_step is None:
            self._first_step = step

    def _update_live(self, line: str) -> None:
        from rich.live import Live
        from rich.text import Text

        text = Text(line, no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(text, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Keep the last line on screen and release the terminal."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None
