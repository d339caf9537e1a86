"""What a measurement writes down while it runs: JSON Lines, so that a run that dies keeps what it measured.

The first line says what was measured on what; then one line per observation, transfer or memory reading; the last line
says that the measurement finished. A file without it is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fcp_cli.cost.fitting import Sample
from fcp_cli.errors import ProfileError
from fcp_cli.kinds import another_kind

FORMAT = "fcp-samples/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A pack to be measured at a degree; a held-out one is never fitted, only compared."""

    lengths: tuple[int, ...]
    degree: int
    held_out: bool = False
    crosses_nodes: bool = False

    @property
    def key(self) -> str:
        """Names the point in the samples file."""
        return f"{self.degree}{'x' if self.crosses_nodes else ''}:{'+'.join(map(str, self.lengths))}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def work(self) -> float:
        """In no unit: grows with the time that a layer takes."""
        return (sum(length * length for length in self.lengths) + 2048 * self.tokens) / self.degree


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionPoint:
    """A call of the vision encoder to be measured: square parts of so many patches along a side.

    `trained` runs a backward, too; a frozen encoder has none.
    """

    sides: tuple[int, ...]
    trained: bool
    held_out: bool = False

    @property
    def key(self) -> str:
        """Names the point in the samples file."""
        parts = (f"{side}x{len(list(alike))}" for side, alike in groupby(self.sides))
        return f"vision {'trained' if self.trained else 'frozen'}:{'+'.join(parts)}"

    @property
    def part_patches(self) -> tuple[int, ...]:
        return tuple(side * side for side in self.sides)

    @property
    def patches(self) -> int:
        return sum(self.part_patches)

    @property
    def work(self) -> float:
        """In no unit: grows with the time that a layer takes."""
        forward = sum(patches * patches for patches in self.part_patches) + 2048 * self.patches
        return float((3 if self.trained else 1) * forward)


P = TypeVar("P", Point, VisionPoint)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoint(Generic[P]):
    """All observations of a point: its seconds are what `SamplesFile.summary` makes of them."""

    point: P
    seconds: float
    spread: float  # (median - lowest decile) / lowest decile
    repeats: int

    def sample(self: MeasuredPoint[Point], *, silent: bool = False) -> Sample:
        return Sample(
            lengths=self.point.lengths,
            degree=self.point.degree,
            seconds=self.seconds,
            crosses_nodes=self.point.crosses_nodes,
            silent=silent and self.point.degree > 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesFile:
    """A samples file as read: the header and the lines by kind."""

    header: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("kind") == kind]

    @property
    def finished(self) -> bool:
        ends = [line["kind"] for line in self.lines if line.get("kind") in ("finished", "resumed")]
        return bool(ends) and ends[-1] == "finished"

    @property
    def shares_cores(self) -> bool:
        """Whether the ranks shared CPU cores while they were measured."""
        return any(line.get("shares_cores") for line in self.of_kind("environment"))

    def summary(self, seconds: Sequence[float]) -> float:
        """One figure for repeated observations: their lowest decile, since other load only ever adds.

        Where the ranks are each other's load they take turns, and the median is what a job sees.
        """
        return float(np.quantile(np.asarray(seconds), 0.5 if self.shares_cores else 0.1))

    def seconds_by_point(self, layers: int) -> dict[str, list[float]]:
        """Observed seconds of each point with so many layers."""
        found: dict[str, list[float]] = {}
        for line in self.of_kind("observation"):
            if line["layers"] == layers:
                found.setdefault(line["point"], []).extend(line["seconds"])
        return found


def read_samples(path: Path) -> SamplesFile:
    """Read a samples file; a last line cut short by a kill is left out.

    Raises:
        ProfileError: unreadable, or not a samples file.
    """
    if mistaken := another_kind(path, "samples"):
        raise ProfileError(mistaken)
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the samples {path}: {getattr(error, 'strerror', None) or error}") from error
    parsed = [_parse(row) for row in rows]
    header = parsed[0] if parsed else None
    if header is None or header.get("format") != FORMAT:
        raise ProfileError(f"{path} holds no samples of 'fcp profile' ({FORMAT}); give another --samples, or remove it")
    return SamplesFile(header=header, lines=[line for line in parsed[1:] if line is not None])


def _parse(row: str) -> dict[str, Any] | None:
    try:
        line = json.loads(row)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line and close the file, so that it survives whatever comes next."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def measured_points(
    samples: SamplesFile, points: Iterable[P], *, layers: Sequence[int], model_layers: int
) -> list[MeasuredPoint[P]]:
    """The points that were observed, for the whole model.

    With two layer counts a < b the model's remaining layers are added at the difference's slope:
    t = t_a + (model_layers - a) (t_b - t_a) / (b - a).
    """
    observed = [samples.seconds_by_point(count) for count in layers]
    found = []
    for point in points:
        seconds = [table.get(point.key, []) for table in observed]
        if all(seconds):
            found.append(_measured(samples, point, seconds, layers, model_layers))
    return found


def spread(seconds: Sequence[float]) -> float:
    """(median - lowest decile) / lowest decile: how far the observations lie apart."""
    low, middle = np.quantile(np.asarray(seconds), [0.1, 0.5])
    return float((middle - low) / low)


def _measured(
    samples: SamplesFile, point: P, seconds: Sequence[Sequence[float]], layers: Sequence[int], model_layers: int
) -> MeasuredPoint[P]:
    each = [samples.summary(values) for values in seconds]
    total = each[0]
    if len(layers) == 2:
        total += (model_layers - layers[0]) * (each[1] - each[0]) / (layers[1] - layers[0])
    return MeasuredPoint(
        point=point,
        seconds=total,
        spread=max(spread(values) for values in seconds),
        repeats=min(len(values) for values in seconds),
    )
