"""State of a running job, seen from outside: collects its latest records and renders them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import PurePath
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Literal

from fcp_cli.runs.metrics import MetricsRecord, RunRecord, StepRecord
from fcp_cli.runs.owner import Owner
from fcp_cli.util.console import bar
from fcp_cli.util.words import clock, counted, one_line, short_count, short_seconds

if TYPE_CHECKING:
    from rich.console import Group

WINDOW_STEPS = 20  # over which pace, rates and idle shares are averaged
_DRIFT_STEPS = 5  # at each end of a run; the median is shown
_SHOWN_DRIFT = 1.05
_SLOW, _SLOW_SHOWN = 1.1, 4  # ratio from which a rank counts as slow, and how many to name
_RANKS_SHOWN = 16
_BAR_COLUMNS = 28
# A run without a live launcher counts as dead after this time, or this many of its steps.
_SILENT_SECONDS, _SILENT_STEPS = 300.0, 20.0

Standing = Literal["running", "finished", "interrupted", "failed", "gone", "silent"]


@dataclass(slots=True)
class RunState:
    """The latest start of a run, its last steps, and measured / planned ratios of the first steps seen."""

    run: RunRecord | None = None
    window: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    first_ratios: list[float] = field(default_factory=list)

    def feed(self, record: MetricsRecord) -> None:
        if record["kind"] == "run":
            self.run = record
            self.window.clear()
            self.first_ratios.clear()
        elif record["kind"] == "step":
            self.window.append(record)
            if len(self.first_ratios) < _DRIFT_STEPS and not record.get("warm_up"):
                self.first_ratios.append(record["seconds"] / record["predicted_seconds"])

    @property
    def last(self) -> StepRecord | None:
        return self.window[-1] if self.window else None

    @property
    def last_step(self) -> int:
        """The latest finished optimizer step; -1 before the first."""
        if self.last is not None:
            return self.last["step"]
        return (0 if self.run is None else self.run.get("first_step", 0)) - 1

    @property
    def started(self) -> float:
        """Unix time of the latest start; 0 if unknown."""
        try:
            return datetime.fromisoformat(self._started_text).timestamp()
        except (ValueError, OverflowError):
            return 0.0

    @property
    def _started_text(self) -> str:
        return "" if self.run is None else self.run.get("started", "")

    @property
    def steps(self) -> int:
        """Step at which the run stops; 0 if not recorded."""
        return 0 if self.run is None else self.run.get("steps", 0)

    @property
    def finished(self) -> bool:
        return self.last is not None and 0 < self.steps <= self.last["step"] + 1

    def _paced(self) -> list[StepRecord]:
        """Return the steps to average over; warm-up only if there are no others."""
        return [record for record in self.window if not record.get("warm_up")] or list(self.window)

    def mean(self, name: Literal["tokens", "seconds", "predicted_seconds", "idle_fraction"]) -> float:
        records = self._paced()
        return sum(float(record[name]) for record in records) / len(records)

    @property
    def seconds_left(self) -> float | None:
        if self.last is None or not self.steps:
            return None
        return float(max(0, self.steps - self.last["step"] - 1) * self.mean("seconds"))

    @property
    def drift(self) -> tuple[float, float] | None:
        """Measured / planned seconds of the first and of the last steps seen; None if there are too few."""
        latest = [record["seconds"] / record["predicted_seconds"] for record in self._paced()[-_DRIFT_STEPS:]]
        if len(self.first_ratios) < _DRIFT_STEPS or len(latest) < _DRIFT_STEPS:
            return None
        return median(self.first_ratios), median(latest)

    def slow_ranks(self) -> dict[int, float]:
        """Return the slow ranks, by single-rank micro-batches relative to plan, with their factor over the median rank.

        A rank that the plan knows to be slow is not reported: its planned times are longer already.
        """
        ratios: dict[int, list[float]] = {}
        for record in self._paced():
            for rank in record["ranks"]:
                alone = [one for one in rank["micro_batches"] if one["degree"] == 1 and one["predicted_seconds"] > 0]
                ratios.setdefault(rank["rank"], []).extend(one["seconds"] / one["predicted_seconds"] for one in alone)
        each = {rank: median(found) for rank, found in sorted(ratios.items()) if len(found) >= _DRIFT_STEPS}
        usual = median_low(each.values()) if each else 0.0
        return {rank: ratio / usual for rank, ratio in each.items() if ratio > _SLOW * usual > 0}

    def idle_of_ranks(self) -> dict[int, float]:
        """Return each rank's idle share over the last steps."""
        idle: dict[int, float] = {}
        seconds = 0.0
        for record in self._paced():
            seconds += record["seconds"]
            for rank in record["ranks"]:
                idle[rank["rank"]] = idle.get(rank["rank"], 0.0) + rank["idle_seconds"]
        return {rank: total / seconds for rank, total in sorted(idle.items())}

    def to_json(self, standing: Standing) -> dict[str, Any]:
        """Return JSON values; rates and shares are means over the last steps."""
        model = None if self.run is None else self.run.get("model")
        document: dict[str, Any] = {"model": model, "steps": self.steps, "standing": standing}
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
            "drift": self.drift,
            "slow_ranks": {str(rank): factor for rank, factor in self.slow_ranks().items()},
        }

    def standing(self, owner: Owner | None, *, quiet_seconds: float) -> Standing:
        """Return whether the run is alive, or else how it ended.

        Args:
            owner: owner of its directory, or None.
            quiet_seconds: time since the last record. Ranks may keep training after their launcher was killed.
        """
        starts_again = owner is not None and owner.since > self._started_text
        if self.finished and not (starts_again and owner is not None and owner.ended is None):
            return "finished"
        if owner is not None:
            return owner.ended or ("gone" if owner.is_gone and not self._moves(quiet_seconds) else "running")
        steps_seconds = _SILENT_STEPS * self.mean("seconds") if self.last is not None else 0.0
        return "silent" if quiet_seconds > max(_SILENT_SECONDS, steps_seconds) else "running"

    def remark(self, standing: Standing, owner: Owner | None, *, quiet_seconds: float) -> str | None:
        """Return a remark if the run ended early or is stalled, else None."""
        if standing == "running":
            return self._quiet_remark(owner, quiet_seconds)
        where = f"after step {self.last['step'] + 1} of {self.steps}" if self.last else "before its first step"
        if standing == "gone" and owner is not None:
            since = clock(owner.age_seconds)
            return f"dead {where}: its launcher on {owner.host} is gone, last heartbeat {since} ago"
        if standing == "silent":
            return f"probably dead {where}: no output for {clock(quiet_seconds)}, and no launcher found"
        if standing == "failed":
            return f"failed {where}; see the output of its ranks in its folder logs"
        return f"interrupted {where}" if standing == "interrupted" else None

    def _quiet_remark(self, owner: Owner | None, quiet_seconds: float) -> str | None:
        if owner is not None and owner.is_gone:
            return f"its launcher on {owner.host} is gone; its ranks may keep training"
        if self.last is None or self._moves(quiet_seconds):
            return None
        state = "the run may have stopped" if owner is None else "its launcher is running"
        return f"no new step for {clock(quiet_seconds)}: {state}"

    def _moves(self, quiet_seconds: float) -> bool:
        """Return whether the last step is younger than five typical steps, or a minute."""
        return self.last is not None and quiet_seconds <= max(60.0, 5.0 * self.mean("seconds"))


def run_view(state: RunState, remark: str | None, *, ascii_only: bool) -> Group:
    """Render the view, at most 80 columns wide, followed by the remark."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in _lines(state, ascii_only)]
    return Group(*lines, *([Text(remark, style="bold")] if remark else []))


def _lines(state: RunState, ascii_only: bool) -> Iterator[str]:
    run = state.run
    if run is not None:
        device = run.get("device_name") or run.get("device", "")
        name = run.get("model") or PurePath(run.get("program", "run")).name
        yield one_line(f"{name} on {counted(run['num_ranks'], 'rank')}, {device}")
    if state.last is None:
        yield "no step was measured so far"
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
    if state.drift is not None and not 1 / _SHOWN_DRIFT <= state.drift[1] / state.drift[0] <= _SHOWN_DRIFT:
        yield f"drift      measured / planned went from x{state.drift[0]:.3f} to x{state.drift[1]:.3f}"
    if slow := state.slow_ranks():
        named = ", ".join(f"rank {rank} x{factor:.2f}" for rank, factor in list(slow.items())[:_SLOW_SHOWN])
        more = f" and {len(slow) - _SLOW_SHOWN} more" if len(slow) > _SLOW_SHOWN else ""
        yield f"slow       {named}{more}"
    yield f"idle       {state.mean('idle_fraction'):.1%}"


def _rank_lines(idle: dict[int, float], ascii_only: bool) -> Iterator[str]:
    shown = sorted(sorted(idle, key=lambda rank: -idle[rank])[:_RANKS_SHOWN])
    yield "idle per rank" if len(shown) == len(idle) else f"the {len(shown)} idlest of {len(idle)} ranks"
    for rank in shown:
        yield f"{rank:>7}  {idle[rank]:6.1%}  {bar(idle[rank], _BAR_COLUMNS, ascii_only=ascii_only)}"
