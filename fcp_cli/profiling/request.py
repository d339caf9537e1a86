"""What the controller asks of the worker: one JSON file that every rank reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic

from fcp_cli.profiling.samples import P, Point, VisionPoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One measurement.

    Attributes:
        model: name or path, as `load_model` takes it.
        layers: layer counts to measure with: the whole model's, or two smaller ones to extrapolate from.
        points: what to measure.
        samples: file to append to; only rank 0 writes it.
        budget_seconds: no observation begins later than that after the first.
        device: `auto`, `cpu`, `cuda` or `npu`.
        dtype: `float32`, or `bfloat16` for fp32 weights under autocast, as the bundled trainer runs.
        emulate: one rank stands for a member of every ring; its peers are silent.
        vision_points: calls of the vision encoder to measure; none where the model has none.
        vision_layers: block counts of it, as `layers`.
    """

    model: str
    layers: tuple[int, ...]
    points: tuple[Point, ...]
    samples: Path
    budget_seconds: float
    device: str = "auto"
    dtype: str = "float32"
    emulate: bool = False
    vision_points: tuple[VisionPoint, ...] = ()
    vision_layers: tuple[int, ...] = ()

    def write(self, path: Path) -> None:
        document: dict[str, Any] = {**asdict(self), "samples": str(self.samples)}
        path.write_text(json.dumps(document), encoding="utf-8")


def read_request(path: Path) -> Request:
    """Read what `Request.write` wrote."""
    document: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    points = tuple(Point(**{**point, "lengths": tuple(point["lengths"])}) for point in document["points"])
    vision = tuple(VisionPoint(**{**point, "sides": tuple(point["sides"])}) for point in document["vision_points"])
    return Request(
        **{
            **document,
            "points": points,
            "layers": tuple(document["layers"]),
            "vision_points": vision,
            "vision_layers": tuple(document["vision_layers"]),
            "samples": Path(document["samples"]),
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Task(Generic[P]):
    """One point with one layer count."""

    point: P
    layers: int

    @property
    def work(self) -> float:
        """In no unit: grows with the time a task takes."""
        return self.layers * self.point.work


class Schedule(Generic[P]):
    """Which task is observed next, so that a budget is spent where it tells most.

    Every task once, cheapest first; then those observed least whose observations still lie apart. A task whose
    estimated time is more than a third of what is left of the budget is left out.
    """

    LEAST_REPEATS = 4
    MOST_REPEATS = 24
    TIGHT_SPREAD = 0.01

    def __init__(self, points: Sequence[P], layers: Sequence[int]) -> None:
        self.tasks: list[Task[P]] = [Task(point=point, layers=count) for point in points for count in layers]
        self.seconds: list[list[float]] = [[] for _ in self.tasks]
        self._rounds = [0] * len(self.tasks)

    def resume(self, observed: Mapping[tuple[int, str], Sequence[float]]) -> None:
        """Take over what a former run observed, by (layers, point key)."""
        for position, task in enumerate(self.tasks):
            self.seconds[position].extend(observed.get((task.layers, task.point.key), ()))
            self._rounds[position] = len(self.seconds[position])

    def add(self, position: int, seconds: Sequence[float]) -> None:
        self.seconds[position].extend(seconds)
        self._rounds[position] += 1

    def next(self, remaining_seconds: float) -> int | None:
        """Position of the next task, or None where nothing is left or affordable."""
        affordable = [
            position
            for position in range(len(self.tasks))
            if not self._is_done(position) and self._estimate(position) <= remaining_seconds / 3
        ]
        return min(affordable, key=lambda position: (self._rounds[position], position), default=None)

    def _is_done(self, position: int) -> bool:
        rounds = self._rounds[position]
        if rounds < self.LEAST_REPEATS:
            return False
        return rounds >= self.MOST_REPEATS or _spread(self.seconds[position]) <= self.TIGHT_SPREAD

    def _estimate(self, position: int) -> float:
        if self.seconds[position]:
            return min(self.seconds[position])
        work = self.tasks[position].work
        known = [(self.tasks[other].work, min(s)) for other, s in enumerate(self.seconds) if s]
        if not known:
            return 0.0
        nearest_work, nearest_seconds = min(known, key=lambda pair: abs(pair[0] - work))
        return nearest_seconds * max(1.0, work / nearest_work)


def _spread(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    low, middle = ordered[len(ordered) // 4], ordered[len(ordered) // 2]
    return (middle - low) / low
