"""Chooses the order of observations within a time budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from fcp_cli.profiling.fits.points import P


@dataclass(frozen=True, kw_only=True, slots=True)
class Task(Generic[P]):
    """A point with a layer count."""

    point: P
    layers: int

    @property
    def work(self) -> float:
        """Relative cost of the task, without a unit."""
        return self.layers * self.point.work


class Schedule(Generic[P]):
    """Chooses the next task to observe, so that the time budget is spent well.

    First each task once, cheapest first; then the least observed tasks whose observations still vary. Tasks estimated
    at more than a third of the remaining budget are skipped.
    """

    LEAST_REPEATS = 4
    MOST_REPEATS = 24  # more repeats do not help samples that still vary
    TIGHT_SPREAD = 0.01  # relative distance of lower quartile and median

    def __init__(self, points: Sequence[P], layers: Sequence[int]) -> None:
        self.tasks: list[Task[P]] = [Task(point=point, layers=count) for point in points for count in layers]
        self.seconds: list[list[float]] = [[] for _ in self.tasks]
        self._rounds = [0] * len(self.tasks)

    def resume(self, observed: Mapping[tuple[int, str], Sequence[float]]) -> None:
        """Add observations of an earlier run, by (layers, point key)."""
        for position, task in enumerate(self.tasks):
            self.seconds[position].extend(observed.get((task.layers, task.point.key), ()))
            self._rounds[position] = len(self.seconds[position])

    def add(self, position: int, seconds: Sequence[float]) -> None:
        self.seconds[position].extend(seconds)
        self._rounds[position] += 1

    def next(self, remaining_seconds: float) -> int | None:
        """Return the index of the next task, or None if none is left or affordable."""
        affordable = [
            position
            for position in range(len(self.tasks))
            if not self._is_done(position) and self.estimate(position) <= remaining_seconds / 3
        ]
        return min(affordable, key=lambda position: (self._rounds[position], position), default=None)

    def _is_done(self, position: int) -> bool:
        rounds = self._rounds[position]
        if rounds < self.LEAST_REPEATS:
            return False
        # Quartile to median: disturbances only make a measurement slower.
        ordered = sorted(self.seconds[position])
        low, middle = ordered[len(ordered) // 4], ordered[len(ordered) // 2]
        return rounds >= self.MOST_REPEATS or (middle - low) / low <= self.TIGHT_SPREAD

    def estimate(self, position: int) -> float:
        """Estimate the seconds of a task; 0 if nothing has run yet."""
        # A new task is estimated from the closest known one, scaled up but never down.
        if self.seconds[position]:
            return min(self.seconds[position])
        work = self.tasks[position].work
        known = [(self.tasks[other].work, min(s)) for other, s in enumerate(self.seconds) if s]
        if not known:
            return 0.0
        nearest_work, nearest_seconds = min(known, key=lambda pair: abs(pair[0] - work))
        return nearest_seconds * max(1.0, work / nearest_work)
