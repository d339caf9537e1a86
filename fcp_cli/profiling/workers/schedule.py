"""The order in which a measurement observes its points within a budget of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from fcp_cli.profiling.fits.points import P


@dataclass(frozen=True, kw_only=True, slots=True)
class Task(Generic[P]):
    """One point with one layer count."""

    point: P
    layers: int

    @property
    def work(self) -> float:
        """A number without a unit that grows with the time that a task takes."""
        return self.layers * self.point.work


class Schedule(Generic[P]):
    """Chooses the task to observe next, so that a budget of time is spent where it counts most.

    Every task once, cheapest first; then those observed least whose observations still lie apart. A task whose
    estimated time is more than a third of the remaining budget is skipped.
    """

    LEAST_REPEATS = 4
    MOST_REPEATS = 24  # samples that still differ then are disturbed by more than noise
    TIGHT_SPREAD = 0.01  # of the lower quartile, up to the median

    def __init__(self, points: Sequence[P], layers: Sequence[int]) -> None:
        self.tasks: list[Task[P]] = [Task(point=point, layers=count) for point in points for count in layers]
        self.seconds: list[list[float]] = [[] for _ in self.tasks]
        self._rounds = [0] * len(self.tasks)

    def resume(self, observed: Mapping[tuple[int, str], Sequence[float]]) -> None:
        """Reuse the observations of an earlier run, by (layers, point key)."""
        for position, task in enumerate(self.tasks):
            self.seconds[position].extend(observed.get((task.layers, task.point.key), ()))
            self._rounds[position] = len(self.seconds[position])

    def add(self, position: int, seconds: Sequence[float]) -> None:
        self.seconds[position].extend(seconds)
        self._rounds[position] += 1

    def next(self, remaining_seconds: float) -> int | None:
        """Return the position of the next task, or None if nothing is left or affordable."""
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
        # From the lower quartile up to the median: disturbances make a measurement slower, never faster.
        ordered = sorted(self.seconds[position])
        low, middle = ordered[len(ordered) // 4], ordered[len(ordered) // 2]
        return rounds >= self.MOST_REPEATS or (middle - low) / low <= self.TIGHT_SPREAD

    def estimate(self, position: int) -> float:
        """Return the seconds that a task may take; 0 if nothing was run yet."""
        # A task that was never run takes the time of the nearest in work, scaled up but never down: work is a guide.
        if self.seconds[position]:
            return min(self.seconds[position])
        work = self.tasks[position].work
        known = [(self.tasks[other].work, min(s)) for other, s in enumerate(self.seconds) if s]
        if not known:
            return 0.0
        nearest_work, nearest_seconds = min(known, key=lambda pair: abs(pair[0] - work))
        return nearest_seconds * max(1.0, work / nearest_work)
