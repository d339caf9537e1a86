"""Reads a run's metrics step by step into arrays, during the run or afterwards.

`open_run` streams large files and skips lines damaged by a kill, `MetricsTail` follows a running job, and
`read_metrics`, for fitting, raises on damage.
"""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.checkpoints import checkpoints
from fcp_cli.runs.metrics import FORMAT, MetricsRecord, RunRecord, StepRecord, parse_record, records_of
from fcp_cli.runs.run_dir import RunPaths, from_here
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.inputs import bounded_lines, open_input
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.words import counted, duration, first_sentence, short_count

_MADE_MEANWHILE = ""  # plan hash of a run that plans while it trains: its plan is not complete yet


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A measured step. Entry i of each array is a micro-batch on a rank; times count from the start of the step.

    Attributes:
        step: optimizer step.
        seconds, predicted_seconds: wall-clock time, and the plan's makespan.
        tokens, loss, idle_fraction, warm_up: see `metrics.step_record`; `loss` is None if not finite.
        ranks, orders, degrees, pack_tokens: rank, order in the step, degree and tokens of each entry.
        planned_seconds, start_seconds, busy_seconds: planned duration, start and measured duration of each entry.
        peak_bytes: [num_ranks] peak memory of each rank; empty if not measured.
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


_TIMING_FIELDS: Final = ("order", "degree", "tokens", "predicted_seconds", "start_seconds", "seconds")


def run_step(record: StepRecord) -> RunStep:
    """Convert a `step` record to arrays."""
    rows = [
        (rank["rank"], *(timing[name] for name in _TIMING_FIELDS))
        for rank in record["ranks"]
        for timing in rank["micro_batches"]
    ]
    table = np.array(rows, dtype=np.float64).reshape(len(rows), 1 + len(_TIMING_FIELDS)).T
    peaks = [rank.get("peak_memory_bytes") for rank in sorted(record["ranks"], key=lambda rank: rank["rank"])]
    return RunStep(
        step=record["step"],
        seconds=record["seconds"],
        predicted_seconds=record["predicted_seconds"],
        tokens=record["tokens"],
        loss=record["loss"],
        idle_fraction=record["idle_fraction"],
        warm_up=record.get("warm_up", False),
        ranks=table[0].astype(np.int64),
        orders=table[1].astype(np.int64),
        degrees=table[2].astype(np.int64),
        pack_tokens=table[3].astype(np.int64),
        planned_seconds=table[4],
        start_seconds=table[5],
        busy_seconds=table[6],
        peak_bytes=np.array([] if None in peaks else peaks, dtype=np.int64),
    )


@dataclass(kw_only=True, slots=True)
class RunFile:
    """A metrics file, with a `run` record per start and a record per step.

    Attributes:
        path: the file.
        run: the first `run` record; while `steps` iterates, the latest one read.
        plan_hash: if given, steps under other plans are skipped.
        plan_steps: if given, other steps are skipped.
        problems: one line per problem; complete once `steps` is exhausted.
        evaluations: held-out loss by step; complete once `steps` is exhausted.
    """

    path: Path
    run: RunRecord
    plan_hash: str | None = None
    plan_steps: range | None = None
    problems: list[str] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.run["num_ranks"]

    @property
    def ranks_per_node(self) -> int:
        return self.run["ranks_per_node"]

    def steps(self, *, every: int = 1) -> Iterator[RunStep]:
        """Yield the steps in file order; with `every` = k, only each k-th is parsed."""
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
            try:
                record = self._record(line)
            except ValueError:
                damaged.append(number)
                continue
            if record is None:
                continue
            if record["kind"] == "run":
                self.run = record
            elif record["kind"] == "eval":
                if record["loss"] is not None and self._reason_against(record["step"], before=-1) is None:
                    self.evaluations[record["step"]] = record["loss"]
            elif (reason := self._reason_against(record["step"], before)) is None:
                before = record["step"]
                yield run_step(record)
            else:
                left_out[reason] += 1
        self._report(damaged, left_out, found)

    def _record(self, line: str) -> MetricsRecord | None:
        """Parse a line; ValueError if it is damaged."""
        record = parse_record(line)
        if record is None or record["kind"] != "step":
            return record
        if max((rank["rank"] for rank in record["ranks"]), default=0) >= self.num_ranks:
            raise ValueError("a rank outside the job")
        return record

    def _reason_against(self, step: int, before: int) -> str | None:
        if self.plan_hash is not None and self.run.get("plan_hash") not in (self.plan_hash, _MADE_MEANWHILE):
            return "another plan's"
        if self.plan_steps is not None and step not in self.plan_steps:
            return "not in the plan"
        return "repeated or out of order" if step <= before else None

    def _report(self, damaged: list[int], left_out: Counter[str], found: int) -> None:
        if damaged:
            where = f"line {damaged[0]}" + (f" and {len(damaged) - 1} more" if len(damaged) > 1 else "")
            self.problems.append(f"{self.path}: {where} truncated or damaged; skipped")
        for reason, count in left_out.items():
            self.problems.append(f"{self.path}: skipped {counted(count, 'step')}: {reason}")
        if not found:
            self.problems.append(f"{self.path} has no finished steps yet")


def open_run(path: Path, *, plan: PlanMetadata | None = None) -> RunFile:
    """Open the metrics of a run.

    Args:
        path: metrics.jsonl, or the run directory.
        plan: if given, only its steps are read.
    """
    name, path = path, metrics_path(path)
    if mistaken := another_kind(path, "metrics"):
        raise RunError(mistaken)
    try:
        run = RunFile(path=path, run=_first_start(path))
    except FileNotFoundError as error:
        raise RunError(_nothing_at(name)) from error
    if plan is not None:
        run.plan_hash, run.plan_steps = plan.plan_hash, range(plan.first_step, plan.end_step)
        if not {plan.plan_hash, _MADE_MEANWHILE} & set(_plan_hashes(path)):
            theirs = str(run.run.get("plan_hash"))[:12]
            raise RunError(f"{path} is of another plan: its hash is {theirs}, but this plan's is {plan.plan_hash[:12]}")
    return run


def _first_start(path: Path) -> RunRecord:
    """Return the first record of a metrics file, which must be a `run` record."""
    try:
        _, first = next(_lines(path), (0, ""))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"cannot read the metrics {path}: {first_sentence(error)}") from error
    if not first:
        raise RunError(f"{path} is empty: the run has written no metrics yet")
    try:
        record = parse_record(first)
    except ValueError as error:
        if f'"{FORMAT}"' in first:
            raise RunError(f"{path}, line 1: the metrics are damaged ({error})") from error
        record = None
    if record is None or record["kind"] != "run" or record.get("format") != FORMAT:
        raise RunError(f'{path} is not the metrics of a run: expected a first line with "format": "{FORMAT}"')
    return record


def _nothing_at(path: Path) -> str:
    if (path / "launch.json").is_file():
        return f"the run {path} has written no metrics yet"
    fault = "has no metrics.jsonl" if path.is_dir() else "does not exist"
    return f"{path} {fault}; name the folder that 'fcp launch' printed"


def metrics_path(path: Path) -> Path:
    """Return the metrics file, given the file or its run directory."""
    return path / "metrics.jsonl" if path.is_dir() else path


def read_metrics(path: Path) -> list[MetricsRecord]:
    """Return all records of a metrics file in order, beginning with a `run` record."""
    if mistaken := another_kind(path, "metrics"):
        raise RunError(mistaken)
    try:
        _first_start(path)
    except FileNotFoundError as error:
        raise RunError(f"cannot read the metrics {path}: {first_sentence(error)}") from error
    return [record for _, record in records_of(path) if record is not None]


class MetricsTail:
    """Follows the metrics of a running job.

    Attributes:
        path: the metrics file, which may not exist yet.
        damaged: number of invalid lines skipped so far.
    """

    def __init__(self, path: Path, *, since: str = "", joins_with: int | None = None) -> None:
        """Follow a metrics file.

        Args:
            path: the metrics file.
            since: ISO time; records of earlier starts are skipped, since a resumed run keeps them.
            joins_with: number of latest steps to parse at first, so that joining a long run is fast.
        """
        self.path = path
        self.damaged = 0
        self._since = since
        self._joins_with = joins_with
        self._follower = FileFollower(path)
        self._is_live = False

    def poll(self) -> list[MetricsRecord]:
        """Return the complete records since the last call, oldest first, without damaged lines.

        If there are several new starts, only the latest and its steps are returned.
        """
        records: list[MetricsRecord] = []
        try:
            lines = self._new_lines()
        except OSError as error:
            raise RunError(f"cannot read the metrics {self.path}: {first_sentence(error)}") from error
        for line in lines:
            try:
                record = parse_record(line)
            except ValueError:
                self.damaged += 1
                continue
            if record is not None and record["kind"] == "run":
                self._is_live = record.get("started", "") >= self._since
            if record is not None and self._is_live:
                records.append(record)
        return records

    def _new_lines(self) -> list[bytes]:
        """Return the line of the latest start, if it is new, and the lines of later steps."""
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
    """Return the plan hashes of all starts: a resumed run may follow another plan."""
    hashes = set()
    for _, line in _lines(path):
        if '"kind":"run"' in line or '"kind": "run"' in line:
            with suppress(ValueError):
                record = parse_record(line)
                if record is not None and record["kind"] == "run":
                    hashes.add(record.get("plan_hash", ""))
    return hashes


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with open_input(path, seekable=True) as file:
        for number, line in enumerate(bounded_lines(file), start=1):
            if line.strip():
                yield number, line.decode(errors="replace")


class FileFollower:
    """Reads a file that grows: each call returns what was appended since the last one.

    Attributes:
        path: the file.
        offset: bytes read so far; reset to 0 if the file was replaced or truncated, as a resumed run does with its
            metrics.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._inode = -1

    def read(self) -> bytes:
        """Return the bytes appended since the last call; b"" if the file does not exist."""
        with self._open() as file:
            new = file.read() if file else b""
            self.offset += len(new)
            return new

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines appended since the last call, including line ends.

        Reads line by line, since the file may have many gigabytes.
        """
        with self._open() as file:
            for line in bounded_lines(file) if file is not None else ():
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)  # before the yield: the caller may stop iterating
                yield line

    @contextmanager
    def _open(self) -> Iterator[BinaryIO | None]:
        try:
            file = open_input(self.path, seekable=True)
        except FileNotFoundError:
            yield None
            return
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self.offset:
                self._inode, self.offset = status.st_ino, 0
            file.seek(self.offset)
            yield file


FAR_OFF = 1.5  # factor between planned and measured step time that needs an explanation
_ESTIMATED = re.compile("^origin: *(analytic|assumed)", re.MULTILINE)  # in a cost profile, which a rank does not parse


def busy_cores() -> str:
    """Return the load of this machine in words if it has more than two runnable processes per core, else ""."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load {load:.0f} on {counted(cores, 'core')}" if load > 2 * cores else ""


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
    _spans: list[list[int]] = field(default_factory=list)  # first and last number of steps in a row
    _paced: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # steps, seconds, planned; without warm-up

    def feed(self, record: MetricsRecord) -> None:
        if record["kind"] != "step":
            return
        ends: StepRecord = {**record, "ranks": []}  # large for thousands of ranks
        if self.last is None or ends["step"] <= self.last["step"]:  # another trainer of the script, or a new start
            self._spans.append([ends["step"] + 1, 0])
        self._spans[-1][1] = ends["step"] + 1
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

    def line(self, *, is_measured: bool = True) -> str:
        """Format steps, loss, tokens, time and the mean step time, beside the planned one if that was measured."""
        if self.first is None or self.last is None:
            return "no step was measured"
        parts = [f"steps {' and '.join(f'{first} to {last}' for first, last in self._spans)}"]
        if self.last["loss"] is not None:
            parts.append(f"loss {_loss(self.first)} -> {_loss(self.last)}")
        parts.append(f"{short_count(self.tokens)} tokens in {duration(self.seconds)}")
        if (slowdown := self.slowdown) is None:
            took, planned = self.last["seconds"], self.last["predicted_seconds"]
            return (
                f"{', '.join(parts)}; the last step took {duration(took)} with its warm-up, planned {duration(planned)}"
            )
        number, seconds, planned = self._paced
        busy = f"; {load}" if slowdown > FAR_OFF and (load := busy_cores()) else ""
        against = f", planned {duration(planned / number)} (x{slowdown:.2f}{busy})" if is_measured else ""
        return f"{', '.join(parts)}; a step took {duration(seconds / number)}{against}"


def closing_line(summary: RunSummary, paths: RunPaths) -> str:
    """Format the final line of a successful run: totals and where its files are."""
    profile, gain, models = (
        path.read_text(encoding="utf-8") if path.is_file() else "" for path in (paths.profile, paths.gain, paths.saved)
    )
    is_measured = _ESTIMATED.search(profile) is None
    places = [f"predicted {gain}"] if gain else []
    if saved := checkpoints(paths.checkpoints):
        places.append(f"checkpoint {from_here(saved[-1])}")
    if kept := [path for path in map(Path, models.splitlines()) if path.is_dir()]:  # trainers delete old checkpoints
        places.append(f"model {from_here(kept[-1])}")
    places.append(f"metrics {from_here(paths.metrics)}" if summary.steps else f"logs in {from_here(paths.logs)}")
    return f"done: {summary.line(is_measured=is_measured)}; {', '.join(places)}"


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
