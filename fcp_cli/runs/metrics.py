"""The metrics of a run: JSON Lines, one `run` record per start, one `step` record per step and one
`eval` record per evaluation (`fcp-metrics/1`).

Each record is written as a full line and flushed, so that readers that follow the file see complete lines. A run
resumed at step k first drops the records of steps >= k, so that no step appears twice.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TextIO, TypeAlias, TypedDict, cast

from msgspec import Meta

from fcp_cli.errors import RunError
from fcp_cli.plan.step import StepPlan
from fcp_cli.util.files import write_text_atomically
from fcp_cli.util.inputs import bounded_lines, decode_record, decode_shape, open_input
from fcp_cli.util.validation import NonNegative, Positive, RankCount, require_shape
from fcp_cli.util.words import first_sentence

FORMAT = "fcp-metrics/1"


Timing: TypeAlias = tuple[int, float, float]
"""Of a micro-batch: order in the step, start in seconds after the rank's step start, and duration in seconds."""


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
    """Return the `step` record of a step.

    Args:
        plan: the step in the plan.
        timings: [num_ranks] micro-batches that each rank ran, in order.
        seconds: wall-clock time between the ends of the previous step and this one, on rank 0.
        loss: summed token loss / tokens of the global batch; NaN if unknown.
        warm_up: whether this is the first step after a start, which includes compilation, caches and connections.
        bad_rows: manifest rows not trained because a picture could not be read.
        peak_bytes: [num_ranks] peak device memory since the start, or host memory on CPUs.
        facts: `grad_norm` and `learning_rate`, if the script reports them, and `mfu` (model FLOPs utilization), if the
            devices' peak is known.
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
        # Includes gradient reduction and the optimizer.
        "idle_fraction": max(0.0, 1.0 - sum(busy) / (len(busy) * seconds)),
        "warm_up": warm_up,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": max(peak_bytes, default=None),
        "ranks": ranks,
        **({"bad_rows": list(bad_rows)} if bad_rows else {}),
    }


def _planned_timing(plan: StepPlan, order: int, start: float, took: float) -> TimingRecord:
    """Return the timing of a micro-batch with its planned seconds."""
    return TimingRecord(
        order=order,
        degree=int(plan.degrees[order]),
        tokens=int(plan.tokens[order]),
        predicted_seconds=float(plan.seconds[order]),
        start_seconds=start,
        seconds=took,
    )


def evaluation_record(step: int, *, seconds: float, buckets: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    """Return the `eval` record of an evaluation on held-out rows.

    Args:
        step: optimizer step after which it ran.
        seconds: wall-clock time on rank 0.
        buckets: (length limit, trained tokens, summed loss) by sequence length, ascending, without empty buckets;
            lengths in a bucket exceed half of its limit.
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
    """Return None for NaN and infinity, which JSON lacks."""
    return None if value is None or not math.isfinite(value) else value


class MetricsWriter:
    """Appends records to a metrics file, each as a flushed line."""

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
        """Flush records to disk; called before a checkpoint of the same steps."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def drop_steps_from(path: Path, first_step: int) -> None:
    """Remove records of steps >= `first_step` and a truncated last line, before a resumed run appends.

    Does nothing if the file is missing.
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
    """Yield (line, record) of a metrics file; a truncated last line is skipped."""
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


# Validated metrics records: all readers parse lines here, and need not check values again.

# Exact as a float: arrays store these values as either.
WholeNumber = Annotated[int, Meta(ge=0, le=1 << 53, description="a whole number of at least 0")]


class TimingRecord(TypedDict):
    """A micro-batch on a rank: predicted and measured seconds, the latter from the start of the step."""

    order: WholeNumber
    degree: RankCount
    tokens: WholeNumber
    predicted_seconds: NonNegative
    start_seconds: NonNegative
    seconds: NonNegative


class _Rank(TypedDict):
    rank: WholeNumber
    idle_seconds: NonNegative
    micro_batches: list[TimingRecord]


class RankRecord(_Rank, total=False):
    """A rank in a step; earlier versions recorded no memory."""

    busy_seconds: NonNegative
    peak_memory_bytes: WholeNumber | None


class _Step(TypedDict):
    kind: Literal["step"]
    step: WholeNumber
    loss: float | None
    tokens: WholeNumber
    seconds: Positive
    predicted_seconds: Positive
    idle_fraction: NonNegative
    ranks: list[RankRecord]


class StepRecord(_Step, total=False):
    """A measured step; earlier versions wrote fewer fields."""

    warm_up: bool
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: NonNegative
    mfu: float | None
    peak_memory_bytes: WholeNumber | None
    bad_rows: list[WholeNumber]


class BucketRecord(TypedDict):
    """Held-out sequences of similar length."""

    up_to_tokens: WholeNumber
    tokens: WholeNumber
    loss: float | None


class EvalRecord(TypedDict):
    """An evaluation after a step."""

    kind: Literal["eval"]
    step: WholeNumber
    loss: float | None
    tokens: WholeNumber
    seconds: NonNegative
    buckets: list[BucketRecord]


class _Run(TypedDict):
    kind: Literal["run"]
    num_ranks: RankCount
    ranks_per_node: RankCount


class RunRecord(_Run, total=False):
    """A start of the run, with the fields that are read; files hold more, for display only."""

    format: str
    plan: str
    plan_hash: str
    started: str
    first_step: WholeNumber
    steps: WholeNumber
    model: str | None
    device: str
    device_name: str | None
    sync: str
    torch: str | None
    program: str


MetricsRecord = RunRecord | StepRecord | EvalRecord
_KIND_WITHIN: Final = 40  # bytes; all our writers put it first
_STEP: Final = re.compile(rb'"kind": ?"step"')
_SHAPES: Final[dict[str, Any]] = {"run": RunRecord, "step": StepRecord, "eval": EvalRecord}


def parse_record(line: str | bytes) -> MetricsRecord | None:
    """Parse a line; return None for kinds that only later versions know."""
    head = line[:_KIND_WITHIN] if isinstance(line, bytes) else line[:_KIND_WITHIN].encode(errors="replace")
    if _STEP.search(head):
        return decode_shape(line, StepRecord)  # large: has values for every rank, so validate while parsing
    record = decode_record(line)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError("it is not a record")
    if kind not in _SHAPES:
        return None
    require_shape(record, _SHAPES[kind])
    return cast(MetricsRecord, record)
