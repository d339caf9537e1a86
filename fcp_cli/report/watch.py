"""A run while it trains, seen from outside: follows its metrics file and draws the latest state."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from fcp_cli.errors import RunError
from fcp_cli.report.bars import bar
from fcp_cli.report.run_file import run_step
from fcp_cli.runs.heartbeat import Heartbeat
from fcp_cli.runs.metrics import FORMAT
from fcp_cli.training.progress import clock, short_count, short_seconds
from fcp_cli.words import counted

if TYPE_CHECKING:
    from rich.console import Group

_WINDOW_STEPS = 20  # over which pace, rates and idle shares are averaged
_RANKS_SHOWN = 16
_BAR_COLUMNS = 28
# A run that nobody vouches for is given up after this long, or after this many of its steps.
_SILENT_SECONDS, _SILENT_STEPS = 300.0, 20.0

Standing = Literal["running", "finished", "interrupted", "failed", "gone", "silent"]


class RunTail:
    """Follows a metrics file; each `poll` returns what is new, damaged lines left out.

    Of a long history only the latest start and its last steps are parsed, so that joining a run late is quick.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """New records, oldest first; none while the file does not exist.

        Raises:
            RunError: the file is not metrics of a run.
        """
        try:
            with self.path.open("rb") as file:
                self._reopen(os.fstat(file.fileno()))
                return list(_parsed(self._new_lines(file)))
        except FileNotFoundError:
            return []

    def _reopen(self, status: os.stat_result) -> None:
        """Start at the top of a file that was replaced or cut, as a resumed run does."""
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode, self._offset = status.st_ino, 0

    def _new_lines(self, file: BinaryIO) -> list[bytes]:
        """The last start among the whole new lines and the steps after it; on joining only the last of them."""
        start: list[bytes] = []
        most = None if self._offset else _WINDOW_STEPS
        steps: deque[bytes] = deque(maxlen=most)
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                break  # still being written
            if self._offset == 0 and f'"{FORMAT}"'.encode() not in line:
                raise RunError(f'{self.path} is not the metrics of a run: its first line has no "format": "{FORMAT}"')
            self._offset += len(line)
            if b'"kind":"run"' in line or b'"kind": "run"' in line:
                start, steps = [line], deque(maxlen=most)
            else:
                steps.append(line)
        return [*start, *steps]


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(KeyError, TypeError, ValueError):
            record = json.loads(line)
            if record["kind"] == "step":
                run_step(record)  # proves it
            if record["kind"] in ("run", "step"):
                yield record


@dataclass(slots=True)
class RunState:
    """The latest start of a run and its last steps."""

    run: dict[str, Any] = field(default_factory=dict)
    window: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_WINDOW_STEPS))

    def feed(self, record: dict[str, Any]) -> None:
        if record["kind"] == "run":
            self.run = record
            self.window.clear()
        else:
            self.window.append(record)

    @property
    def last(self) -> Mapping[str, Any] | None:
        return self.window[-1] if self.window else None

    @property
    def steps(self) -> int:
        """Where the run will stop; 0 where the run did not say."""
        return int(self.run.get("steps", 0))

    @property
    def finished(self) -> bool:
        return self.last is not None and 0 < self.steps <= self.last["step"] + 1

    def _paced(self) -> list[dict[str, Any]]:
        """The steps to average over: warm-up only where there is nothing else."""
        return [record for record in self.window if not record.get("warm_up")] or list(self.window)

    def mean(self, name: str) -> float:
        records = self._paced()
        return sum(float(record[name]) for record in records) / len(records)

    @property
    def seconds_left(self) -> float | None:
        if self.last is None or not self.steps:
            return None
        return float(max(0, self.steps - self.last["step"] - 1) * self.mean("seconds"))

    def idle_of_ranks(self) -> dict[int, float]:
        """Rank -> share of the last steps in which it ran no micro-batch."""
        idle: dict[int, float] = {}
        seconds = 0.0
        for record in self._paced():
            seconds += record["seconds"]
            for rank in record["ranks"]:
                idle[rank["rank"]] = idle.get(rank["rank"], 0.0) + rank["idle_seconds"]
        return {rank: total / seconds for rank, total in sorted(idle.items())}

    def to_json(self, standing: Standing) -> dict[str, Any]:
        """JSON values; rates and shares are means over the last steps."""
        document: dict[str, Any] = {"model": self.run.get("model"), "steps": self.steps, "standing": standing}
        document["finished"] = standing == "finished"
        if self.last is None:
            return {**document, "step": None}
        return {
            **document,
            "step": self.last["step"],
            "loss": self.last["loss"],
            "tokens_per_second": self.mean("tokens") / self.mean("seconds"),
            "seconds": self.mean("seconds"),
            "predicted_seconds": self.mean("predicted_seconds"),
            "idle_fraction": self.mean("idle_fraction"),
            "seconds_left": self.seconds_left,
            "idle_of_ranks": list(self.idle_of_ranks().values()),
        }

    def standing(self, heartbeat: Heartbeat | None, *, quiet_seconds: float) -> Standing:
        """Whether the run goes on, and if not, how it ended.

        Args:
            heartbeat: of its launcher; None for a job that `fcp launch` did not start.
            quiet_seconds: since the run wrote last. The ranks of a launcher that was killed may go on without it.
        """
        starts_anew = heartbeat is not None and heartbeat.started > self.run.get("started", "")
        if self.finished and not (starts_anew and heartbeat is not None and heartbeat.ended is None):
            return "finished"
        if heartbeat is not None:
            return heartbeat.ended or ("gone" if heartbeat.is_gone and not self._moves(quiet_seconds) else "running")
        steps_seconds = _SILENT_STEPS * self.mean("seconds") if self.last is not None else 0.0
        return "silent" if quiet_seconds > max(_SILENT_SECONDS, steps_seconds) else "running"

    def remark(self, standing: Standing, heartbeat: Heartbeat | None, *, quiet_seconds: float) -> str | None:
        """One line about a run that ended unfinished, or that has not moved for long; None about any other."""
        if standing == "running":
            return self._quiet_remark(heartbeat, quiet_seconds)
        where = f"after step {self.last['step'] + 1} of {self.steps}" if self.last else "before its first step"
        if standing == "gone" and heartbeat is not None:
            since = clock(heartbeat.age_seconds)
            return f"dead {where}: its launcher on {heartbeat.host} is gone, its last sign of life was {since} ago"
        if standing == "silent":
            return f"probably dead {where}: nothing new for {clock(quiet_seconds)}, and no launcher vouches for it"
        if standing == "failed":
            return f"failed {where}; what its ranks printed is in its folder logs"
        return f"interrupted {where}" if standing == "interrupted" else None

    def _quiet_remark(self, heartbeat: Heartbeat | None, quiet_seconds: float) -> str | None:
        if heartbeat is not None and heartbeat.is_gone:
            return f"its launcher on {heartbeat.host} is gone; its ranks may go on without it"
        if self.last is None or self._moves(quiet_seconds):
            return None
        what = "the run may have stopped" if heartbeat is None else "its launcher is at work"
        return f"no new step for {clock(quiet_seconds)}: {what}"

    def _moves(self, quiet_seconds: float) -> bool:
        """Whether the last step is no longer ago than five usual ones, or a minute."""
        return self.last is not None and quiet_seconds <= max(60.0, 5.0 * self.mean("seconds"))


def run_view(state: RunState, remark: str | None, *, ascii_only: bool) -> Group:
    """The whole view, at most 80 columns wide, and the remark below it."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in _lines(state, ascii_only)]
    return Group(*lines, *([Text(remark, style="bold")] if remark else []))


def _lines(state: RunState, ascii_only: bool) -> Iterator[str]:
    run = state.run
    device = run.get("device_name") or run.get("device", "")
    if run:
        yield f"{run.get('model', 'run')} on {counted(int(run.get('num_ranks', 0)), 'rank')}, {device}"
    if state.last is None:
        yield "no finished step yet"
        return
    yield from _figures(state, ascii_only)
    yield from _rank_lines(state.idle_of_ranks(), ascii_only)


def _figures(state: RunState, ascii_only: bool) -> Iterator[str]:
    assert state.last is not None
    done, loss = state.last["step"] + 1, state.last["loss"]
    seconds, predicted = state.mean("seconds"), state.mean("predicted_seconds")
    if state.steps:
        left = "finished" if state.finished else f"{clock(state.seconds_left or 0.0)} left"
        share = bar(done / state.steps, _BAR_COLUMNS, ascii_only=ascii_only).ljust(_BAR_COLUMNS)
        yield f"step       {done}/{state.steps}  {share}  {left}"
    else:
        yield f"step       {done}"
    yield f"loss       {'nan' if loss is None else format(loss, '.4f')}"
    yield f"tokens/s   {short_count(state.mean('tokens') / seconds)}"
    yield f"step time  {short_seconds(seconds)} s, planned {short_seconds(predicted)} s: x{seconds / predicted:.3f}"
    yield f"idle       {state.mean('idle_fraction'):.1%}"


def _rank_lines(idle: dict[int, float], ascii_only: bool) -> Iterator[str]:
    shown = sorted(sorted(idle, key=lambda rank: -idle[rank])[:_RANKS_SHOWN])
    yield "idle per rank" if len(shown) == len(idle) else f"the {len(shown)} idlest of {len(idle)} ranks"
    for rank in shown:
        yield f"{rank:>7}  {idle[rank]:6.1%}  {bar(idle[rank], _BAR_COLUMNS, ascii_only=ascii_only)}"
