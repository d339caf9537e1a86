"""Show a run while it trains: one live line on a terminal, one plain line every few steps through a pipe.

It is fed with metrics records, so the trainer and whoever watches it from outside show the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fcp_cli.words import counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_STEPS_FOR_PACE = 20


def progress_line(record: Mapping[str, Any], *, steps: int, seconds_left: float | None) -> str:
    """Describe one step, in at most 80 columns below 1,000 steps and an hour to go; beyond, the end may be cut.

    What comes last and is cut first is the share of the devices' peak, where that is known, and a rank's most memory.
    """
    seconds = record["seconds"]
    parts = [
        f"step {record['step'] + 1}/{steps}",
        f"loss {_loss(record['loss'])}",
        f"{short_count(record['tokens'] / seconds)} tok/s",
        f"{short_seconds(seconds)}s (plan {short_seconds(record['predicted_seconds'])})",
        f"idle {record['idle_fraction']:.0%}",
    ]
    if record.get("bad_rows"):
        parts.append(counted(len(record["bad_rows"]), "bad row"))
    if seconds_left is not None:
        parts.append(f"{clock(seconds_left)} left")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.0%}")
    if record.get("peak_memory_bytes"):
        parts.append(f"{record['peak_memory_bytes'] / 1e9:.3g} GB")
    return "  ".join(parts)


def evaluation_line(record: Mapping[str, Any], *, steps: int) -> str:
    """Describe an evaluation: the loss per learned token in all, and by the length of sequences."""
    parts = [
        f"evaluation {record['step'] + 1}/{steps}",
        f"loss {_loss(record['loss'])} of {short_count(record['tokens'])} tokens",
        *(f"up to {one['up_to_tokens']:,}: {_loss(one['loss'])}" for one in record["buckets"]),
        f"{short_seconds(record['seconds'])}s",
    ]
    return "  ".join(parts)


def _loss(value: float | None) -> str:
    return "nan" if value is None else format(value, ".4f")


def short_count(number: float) -> str:
    """Write 1234567 as 1.23M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def short_seconds(seconds: float) -> str:
    """Write seconds in at most five characters up to a day: 0.012, 1.23, 12.34, 1234."""
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def clock(seconds: float) -> str:
    """Write 3725 seconds as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class TrainingProgress:
    """The live display of a run. Feed it every record; close it at the end, however the end comes.

    Args:
        console: where to print.
        every: steps between two plain lines; the first and the last step are always printed.
    """

    def __init__(self, console: Console, *, every: int = 10) -> None:
        self._console = console
        self._every = every
        self._steps = 0
        self._first_step: int | None = None
        self._pace: deque[float] = deque(maxlen=_STEPS_FOR_PACE)
        self._live: Live | None = None

    def feed(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "run":
            self._steps = record.get("steps", 0)
            self._first_step = None
        elif record["kind"] == "step":
            self._show(record)
        elif record["kind"] == "eval":
            line = evaluation_line(record, steps=self._steps)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)  # above the live line, if any

    def _show(self, record: Mapping[str, Any]) -> None:
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
        """Keep the last line on the screen and release the terminal."""
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()
            self._live = None
