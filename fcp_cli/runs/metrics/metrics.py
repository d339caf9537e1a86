"""The metrics of a run: JSON Lines, one `run` record per start, one `step` record per step and one
`eval` record per evaluation (`fcp-metrics/1`).

A record is written whole and flushed, so that a reader that follows the file sees whole lines only; a run that is
resumed at step k first drops the records of steps >= k, so that no step appears twice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.plan.step import StepPlan
from fcp_cli.reading.inputs import bounded_lines, open_input
from fcp_cli.runs.metrics.metrics_record import MetricsRecord, TimingRecord, parse_record
from fcp_cli.words import first_sentence

FORMAT = "fcp-metrics/1"


Timing: TypeAlias = tuple[int, float, float]
"""Order in the step, seconds from the rank's start of the step to its start, and seconds of one micro-batch."""


def step_record(
    plan: StepPlan,
    timings: Sequence[Sequence[Timing]],
    *,
    seconds: float,
    loss: float,
    warm_up: bool = False,
    bad_rows: Sequence[int] = (),
    peak_bytes: Sequence[int] = (),
    **facts: float | None,
) -> dict[str, Any]:
    """Return the `step` record of a step that all ranks have finished.

    Args:
        plan: the step in the plan.
        timings: [num_ranks] the micro-batches that each rank ran, in order.
        seconds: wall-clock time from the end of the step before to the end of this one, on rank 0.
        loss: summed token loss / tokens of the global batch; NaN if it is not known, too.
        warm_up: the first step after a start: it also pays for compilation, caches and connections.
        bad_rows: manifest rows of which nothing was learned, since a picture of theirs could not be read.
        peak_bytes: [num_ranks] the most that each rank has had of its device since its start, or of a host's memory.
        facts: `grad_norm` and `learning_rate`, if the script says them, and `mfu`, the share of all devices' peak that
            the model's arithmetic came to, if the peak is known.
    """
    busy = [sum(took for _, _, took in of_rank) for of_rank in timings]
    ranks = [
        {
            "rank": rank,
            "busy_seconds": busy[rank],
            "idle_seconds": max(0.0, seconds - busy[rank]),
            **({"peak_memory_bytes": peak_bytes[rank]} if peak_bytes else {}),
            "micro_batches": [_planned_timing(plan, *timing) for timing in of_rank],
        }
        for rank, of_rank in enumerate(timings)
    ]
    tokens = int(plan.tokens.sum())
    return {
        "kind": "step",
        "step": plan.step,
        "loss": _finite(loss),
        "tokens": tokens,
        **{name: _finite(facts.get(name)) for name in ("grad_norm", "learning_rate", "mfu")},
        "seconds": seconds,
        "predicted_seconds": plan.makespan_seconds,
        # Waiting, gradient reduction and the optimizer.
        "idle_fraction": max(0.0, 1.0 - sum(busy) / (len(busy) * seconds)),
        "warm_up": warm_up,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": max(peak_bytes, default=None),
        "ranks": ranks,
        **({"bad_rows": list(bad_rows)} if bad_rows else {}),
    }


def _planned_timing(plan: StepPlan, order: int, start: float, took: float) -> TimingRecord:
    """Return a measured micro-batch with its planned seconds."""
    return TimingRecord(
        order=order,
        degree=int(plan.degrees[order]),
        tokens=int(plan.tokens[order]),
        predicted_seconds=float(plan.seconds[order]),
        start_seconds=start,
        seconds=took,
    )


def evaluation_record(step: int, *, seconds: float, buckets: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Return the `eval` record of the losses of held-out rows after a step.

    Args:
        step: the optimizer step after which they were computed.
        seconds: wall-clock time on rank 0.
        buckets: by length of the sequences, shortest first, those with learned tokens only: the most tokens of such a
            sequence (the fewest are more than half as many), their learned tokens, and the sum of these tokens' losses.
    """
    tokens = sum(learned for _, learned, _ in buckets)
    return {
        "kind": "eval",
        "step": step,
        "loss": _finite(sum(loss_sum for *_, loss_sum in buckets) / max(tokens, 1)),
        "tokens": tokens,
        "seconds": seconds,
        "buckets": [
            {"up_to_tokens": up_to, "tokens": learned, "loss": _finite(loss_sum / learned)}
            for up_to, learned, loss_sum in buckets
        ],
    }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: a loss that ran away is written as null."""
    return None if value is None or not math.isfinite(value) else value


class MetricsWriter:
    """Appends records to the file of a run; one whole, flushed line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write the metrics {path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Flush the records to disk, before a checkpoint of the same steps."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def drop_steps_from(path: Path, first_step: int) -> None:
    """Remove the records of steps >= `first_step`, and a last line cut short by a kill, before a resumed run appends.

    A missing file is left missing.
    """
    if not path.is_file():
        return
    kept = [
        line
        for line, record in records_of(path)
        if record is None or record["kind"] == "run" or record["step"] < first_step
    ]
    write_text_atomically(path, "".join(f"{line}\n" for line in kept))


def records_of(path: Path) -> Iterator[tuple[str, MetricsRecord | None]]:
    """Yield each line of a metrics file with its record; a last line that a kill cut short is skipped."""
    try:
        with open_input(path, seekable=True) as file:
            for number, line in enumerate(bounded_lines(file), start=1):
                if line.strip() and (line.endswith(b"\n") or _is_whole(line)):
                    yield line.decode(errors="replace").rstrip("\n"), _record(line, path, number)
    except OSError as error:
        raise RunError(f"cannot read the metrics {path}: {first_sentence(error)}") from error


def _is_whole(last_line: bytes) -> bool:
    with suppress(ValueError):
        parse_record(last_line)
        return True
    return False


def _record(line: bytes, path: Path, number: int) -> MetricsRecord | None:
    try:
        return parse_record(line)
    except ValueError as error:
        raise RunError(f"{path}, line {number}: the metrics are damaged ({error})") from error
