"""Reads the metrics of a run, step by step, in arrays, while the run is at work or afterwards.

`open_run` reads gigabytes line by line and leaves out what a killed run damaged, `MetricsTail` follows a run from
outside, and `read_metrics`, for fitting, refuses damage.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.errors import RunError
from fcp_cli.kinds import another_kind
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.reading.documents import decode_record
from fcp_cli.runs.follower import FileFollower
from fcp_cli.runs.metrics import FORMAT, records_of
from fcp_cli.validation import Count, NonNegative, NonNegativeCount, Positive, require_shape
from fcp_cli.words import counted

_MADE_MEANWHILE = ""  # plan hash of a run that planned while it trained: its plan was not whole yet


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """One measured step; entry i of each array is one micro-batch on one rank. Times count from the step's start.

    Attributes:
        step: optimizer step.
        seconds, predicted_seconds: wall-clock time, and the plan's makespan.
        tokens, loss, idle_fraction, warm_up: as in the record; `loss` is None where it was not finite.
        ranks, orders, degrees, pack_tokens: which micro-batch ran where.
        planned_seconds, start_seconds, busy_seconds: of each micro-batch on each rank.
        peak_bytes: [num_ranks] the most memory that each rank has had; empty where it was not measured.
    """

    step: int
    seconds: float
    predicted_seconds: float
    tokens: int
    loss: float | None
    idle_fraction: float
    warm_up: bool
    ranks: IntArray
    orders: IntArray
    degrees: IntArray
    pack_tokens: IntArray
    planned_seconds: FloatArray
    start_seconds: FloatArray
    busy_seconds: FloatArray
    peak_bytes: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Of a `run` record, what is read, if it is there; what else it says is shown as it is."""

    num_ranks: Count = 1
    started: str = ""
    steps: NonNegativeCount = 0
    first_step: NonNegativeCount = 0
    plan_hash: str | None = None
    plan: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timing:
    order: NonNegativeCount
    seconds: NonNegative
    degree: Count = 1
    tokens: NonNegativeCount = 0
    predicted_seconds: NonNegative = 0.0
    start_seconds: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    rank: NonNegativeCount
    micro_batches: list[_Timing]
    idle_seconds: NonNegative = 0.0
    peak_memory_bytes: NonNegativeCount | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    step: NonNegativeCount
    ranks: list[_Rank]
    seconds: Positive = 1.0
    predicted_seconds: Positive = 1.0
    loss: float | None = None
    tokens: NonNegativeCount = 0
    idle_fraction: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evaluation:
    step: NonNegativeCount
    loss: float | None
    tokens: NonNegativeCount
    seconds: NonNegative


_SHAPES: Final = {"run": _Run, "step": _Step, "eval": _Evaluation}


def require_record(record: Any) -> None:
    """Check what is read of a record, whatever else it holds; a kind that is not known holds anything.

    Raises:
        ValueError: it is damaged.
    """
    if not isinstance(record, dict):
        raise ValueError("it is no record")
    if (shape := _SHAPES.get(str(record.get("kind")))) is not None:
        require_shape(record, shape)


_TIMING_FIELDS = ("order", "degree", "tokens", "predicted_seconds", "start_seconds", "seconds")


def run_step(record: dict[str, Any], *, num_ranks: int | None = None) -> RunStep:
    """Return the arrays of one `step` record.

    Args:
        record: as `runs.metrics` writes it.
        num_ranks: of the job, where it is known.

    Raises:
        ValueError: it is not one, or holds what no run can have measured.
    """
    require_shape(record, _Step)
    rows = [
        (rank["rank"], *(timing[name] for name in _TIMING_FIELDS))
        for rank in record["ranks"]
        for timing in rank["micro_batches"]
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 1 + len(_TIMING_FIELDS)).T
    loss = record["loss"]
    step = RunStep(
        step=int(record["step"]),
        seconds=float(record["seconds"]),
        predicted_seconds=float(record["predicted_seconds"]),
        tokens=int(record["tokens"]),
        loss=None if loss is None else float(loss),
        idle_fraction=float(record["idle_fraction"]),
        warm_up=bool(record.get("warm_up")),
        ranks=table[0].astype(np.int64),
        orders=table[1].astype(np.int64),
        degrees=table[2].astype(np.int64),
        pack_tokens=table[3].astype(np.int64),
        planned_seconds=table[4],
        start_seconds=table[5],
        busy_seconds=table[6],
        peak_bytes=_peaks(record["ranks"]),
    )
    whole = (step.seconds, step.predicted_seconds)
    if step.step < 0 or not all(math.isfinite(value) and value > 0 for value in whole):
        raise ValueError("a step that no run can have measured")
    if not (np.isfinite(table).all() and (table >= 0).all() and math.isfinite(step.idle_fraction)):
        raise ValueError("times or counts that no run can have measured")
    if num_ranks is not None and (step.ranks >= num_ranks).any():
        raise ValueError("a rank outside the job")
    return step


def _peaks(ranks: list[dict[str, Any]]) -> IntArray:
    peaks = [rank.get("peak_memory_bytes") for rank in sorted(ranks, key=lambda rank: int(rank["rank"]))]
    return np.array([] if None in peaks else peaks, dtype=np.int64)


@dataclass(kw_only=True, slots=True)
class RunFile:
    """A metrics file: the record of its latest start, and its steps.

    Attributes:
        run: the first `run` record, or the latest that was met.
        plan_hash: where given, steps that another plan drove are left out.
        plan_steps: where given, steps that are not among these are left out.
        problems: one line each, complete once the steps have been read.
        evaluations: step -> loss of the held-out rows after it, complete once the steps have been read.
    """

    path: Path
    run: dict[str, Any]
    plan_hash: str | None = None
    plan_steps: range | None = None
    problems: list[str] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return int(self.run["num_ranks"])

    @property
    def ranks_per_node(self) -> int:
        return int(self.run["ranks_per_node"])

    def steps(self, *, every: int = 1) -> Iterator[RunStep]:
        """Yield the steps in the file's order; with `every` = k only each k-th is parsed."""
        self.problems.clear()
        self.evaluations.clear()
        damaged: list[int] = []
        left_out: Counter[str] = Counter()
        found, before = 0, -1
        for number, line in _lines(self.path):
            is_step = line.startswith('{"kind":"step"') or '"kind": "step"' in line[:40]
            found += is_step
            if is_step and (found - 1) % every:
                continue
            record = self._parse(line)
            if record is None:
                damaged.append(number)
            elif isinstance(record, RunStep):
                reason = self._reason_against(record.step, before)
                if reason is None:
                    before = record.step
                    yield record
                else:
                    left_out[reason] += 1
            elif record["kind"] == "eval":
                self._add_evaluation(record["step"], record["loss"])
        self._report(damaged, left_out, found)

    def _add_evaluation(self, step: int, loss: float | None) -> None:
        if loss is not None and self._reason_against(step, before=-1) is None:
            self.evaluations[step] = loss

    def _parse(self, line: str) -> RunStep | dict[str, Any] | None:
        """Return a step, a record of another kind, or None for damage; a `run` record becomes current."""
        try:
            record = decode_record(line)
            require_record(record)
            if record["kind"] == "step":
                return run_step(record, num_ranks=self.num_ranks)
            if record["kind"] == "run":
                # Both raise here where they are missing or no numbers, so that the record counts as damaged.
                int(record["num_ranks"]), int(record["ranks_per_node"])
                self.run = record
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None
        return dict(record)

    def _reason_against(self, step: int, before: int) -> str | None:
        if self.plan_hash is not None and self.run.get("plan_hash") not in (self.plan_hash, _MADE_MEANWHILE):
            return "another plan's"
        if self.plan_steps is not None and step not in self.plan_steps:
            return "not in the plan"
        return "repeated or out of order" if step <= before else None

    def _report(self, damaged: list[int], left_out: Counter[str], found: int) -> None:
        if damaged:
            where = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            self.problems.append(f"{self.path}: {where} cut short or damaged; left out")
        for reason, count in left_out.items():
            self.problems.append(f"{self.path}: left out {counted(count, 'step')}: {reason}")
        if not found:
            self.problems.append(f"{self.path} has no finished steps yet")


def open_run(path: Path, *, plan: PlanMetadata | None = None) -> RunFile:
    """Open the metrics of a run.

    Args:
        path: metrics.jsonl, or the run's folder.
        plan: the plan that the pictures are of.

    Raises:
        RunError: there is no such file, it is empty, not metrics of a run, or of another plan altogether.
    """
    name, path = path, metrics_path(path)
    if mistaken := another_kind(path, "metrics"):
        raise RunError(mistaken)
    try:
        _, first = next(_lines(path), (0, ""))
    except FileNotFoundError as error:
        raise RunError(_nothing_at(name)) from error
    except OSError as error:
        raise RunError(f"cannot read the metrics {path}: {error.strerror}") from error
    if not first:
        raise RunError(f"{path} is empty: the run has written no metrics yet")
    run = RunFile(path=path, run={})
    record = run._parse(first)
    if not isinstance(record, dict) or record.get("format") != FORMAT or not run.run:
        raise RunError(f'{path} is not the metrics of a run: expected a first line with "format": "{FORMAT}"')
    if plan is not None:
        run.plan_hash, run.plan_steps = plan.plan_hash, range(plan.first_step, plan.end_step)
        if not {plan.plan_hash, _MADE_MEANWHILE} & set(_plan_hashes(path)):
            theirs = str(run.run.get("plan_hash"))[:12]
            raise RunError(f"{path} is of another plan: its hash is {theirs}, this plan's {plan.plan_hash[:12]}")
    return run


def _nothing_at(path: Path) -> str:
    if (path / "launch.json").is_file():
        return f"the run {path} has written no metrics yet"
    what = "has no metrics.jsonl" if path.is_dir() else "does not exist"
    return f"{path} {what}; name the folder that 'fcp launch' printed"


def metrics_path(path: Path) -> Path:
    """Return the metrics file of a run that was named by its folder, or the file itself."""
    return path / "metrics.jsonl" if path.is_dir() else path


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all records of a metrics file, in order.

    Raises:
        RunError: the file is missing, damaged, or not metrics of a run.
    """
    if mistaken := another_kind(path, "metrics"):
        raise RunError(mistaken)
    records: list[dict[str, Any]] = []
    for _, record in records_of(path):
        try:
            require_record(record)
        except ValueError as error:
            raise RunError(f"{path}, record {len(records) + 1}: the metrics are damaged ({error})") from error
        records.append(record)
    if not records or not isinstance(records[0], dict) or records[0].get("format") != FORMAT:
        raise RunError(f'{path} is not the metrics of a run: expected a first line with "format": "{FORMAT}"')
    return records


class MetricsTail:
    """Follows the metrics of a run from outside.

    Attributes:
        path: of the metrics file, which may not exist yet.
    """

    def __init__(self, path: Path, *, since: str = "", joins_with: int | None = None) -> None:
        """Follow a metrics file.

        Args:
            path: of the file.
            since: ISO time; records of a start before it are passed over: a resumed run keeps those of the first.
            joins_with: so many of the latest steps at most are parsed on joining, so that it is quick late in a run.
        """
        self.path = path
        self._since = since
        self._joins_with = joins_with
        self._follower = FileFollower(path)
        self._is_live = False

    def poll(self) -> list[dict[str, Any]]:
        """Return the whole records that are new since the last call, oldest first, damaged lines left out.

        Of several new starts only the latest counts, with its steps.

        Raises:
            RunError: the file is not metrics of a run.
        """
        records: list[dict[str, Any]] = []
        for line in self._latest_lines():
            with suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
                record = decode_record(line)
                require_record(record)
                if record["kind"] == "run":
                    self._is_live = record.get("started", "") >= self._since
                elif record["kind"] == "step":
                    run_step(record)  # raises where the record is damaged
                elif record["kind"] != "eval":
                    continue
                if self._is_live:
                    records.append(record)
        return records

    def _latest_lines(self) -> list[bytes]:
        """Return the new line of the latest start, if any, and the lines of the steps after it."""
        start: list[bytes] = []
        steps: deque[bytes] | None = None
        for line in self._follower.lines():
            if steps is None:
                joins = self._follower.offset == len(line)
                if joins and f'"{FORMAT}"'.encode() not in line:
                    raise RunError(
                        f'{self.path} is not the metrics of a run: its first line has no "format": "{FORMAT}"'
                    )
                steps = deque(maxlen=self._joins_with if joins else None)
            if b'"kind":"run"' in line or b'"kind": "run"' in line:
                start = [line]
                steps.clear()
            else:
                steps.append(line)
        return [*start, *(steps or ())]


def _plan_hashes(path: Path) -> set[str]:
    """Return the plan hash of every start of the run: a resumed one may have been given another plan."""
    hashes = set()
    for _, line in _lines(path):
        if '"kind":"run"' in line or '"kind": "run"' in line:
            try:
                hashes.add(str(decode_record(line).get("plan_hash")))
            except (ValueError, AttributeError):
                continue
    return hashes


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line
