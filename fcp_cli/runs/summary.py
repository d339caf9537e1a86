"""Totals of a run from its metrics, and the final line that it prints."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.reading.inputs import bounded_lines, open_input
from fcp_cli.runs.checkpoints.checkpoint_header import checkpoints
from fcp_cli.runs.folder import RunPaths, from_here
from fcp_cli.runs.metrics.metrics_record import MetricsRecord, StepRecord, parse_record
from fcp_cli.words import duration, first_sentence, short_count


@dataclass(slots=True)
class RunSummary:
    """Totals over the steps passed to `feed`.

    Attributes:
        first, last: first and last `step` record, or None.
        steps: number of steps.
        tokens, seconds: sums over the steps.
    """

    first: StepRecord | None = None
    last: StepRecord | None = None
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    _paced: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # steps, seconds, planned; without warm-up

    def feed(self, record: MetricsRecord) -> None:
        if record["kind"] != "step":
            return
        ends: StepRecord = {**record, "ranks": []}  # large for thousands of ranks
        self.first, self.last = self.first or ends, ends
        self.steps += 1
        self.tokens += record["tokens"]
        self.seconds += record["seconds"]
        if not record.get("warm_up"):
            for at, value in enumerate((1.0, record["seconds"], record["predicted_seconds"])):
                self._paced[at] += value

    @property
    def slowdown(self) -> float | None:
        """Mean seconds of a step relative to those planned, without warm-up; None if no such step was measured."""
        number, seconds, planned = self._paced
        return seconds / planned if number and planned else None

    def line(self) -> str:
        """Format steps, loss, tokens, time, and the mean measured and planned step time."""
        if self.first is None or self.last is None:
            return "no step was measured"
        parts = [f"steps {self.first['step'] + 1} to {self.last['step'] + 1}"]
        if self.last["loss"] is not None:
            parts.append(f"loss {_loss(self.first)} -> {_loss(self.last)}")
        parts.append(f"{short_count(self.tokens)} tokens in {duration(self.seconds)}")
        if (slowdown := self.slowdown) is None:
            took, planned = self.last["seconds"], self.last["predicted_seconds"]
            return (
                f"{', '.join(parts)}; the last step took {duration(took)} with its warm-up, planned {duration(planned)}"
            )
        number, seconds, planned = self._paced
        mean = f"a step took {duration(seconds / number)}, planned {duration(planned / number)}"
        return f"{', '.join(parts)}; {mean} (x{slowdown:.2f})"


def closing_line(summary: RunSummary, paths: RunPaths) -> str:
    """Format the final line of a successful run: totals and where its files are."""
    places = []
    if saved := checkpoints(paths.checkpoints):
        places.append(f"checkpoint {from_here(saved[-1])}")
    places.append(f"metrics {from_here(paths.metrics)}" if summary.steps else f"logs in {from_here(paths.logs)}")
    return f"done: {summary.line()}; {', '.join(places)}"


def summary_of(metrics: Path) -> RunSummary:
    """Sum up a metrics file over all starts; damaged lines are skipped, a missing file counts as empty."""
    summary = RunSummary()
    try:
        with open_input(metrics, seekable=True) as file:
            for line in bounded_lines(file):
                with suppress(ValueError):
                    record = parse_record(line)
                    if record is not None:
                        summary.feed(record)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RunError(f"cannot read the metrics {metrics}: {first_sentence(error)}") from error
    return summary


def _loss(record: StepRecord) -> str:
    return "nan" if record["loss"] is None else f"{record['loss']:.4f}"
