"""What a measurement writes down while it runs: JSON Lines, so that a run that dies keeps what it measured.

The first line says what was measured on what; then one line per observation, transfer or memory reading; the last line
says that the measurement finished. A file without it is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fcp_cli.cost.fitting import Sample
from fcp_cli.errors import ProfileError

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoint:
    """All observations of a point: its seconds are their lowest decile, which load from elsewhere hardly moves."""

    point: Point
    seconds: float
    spread: float  # (median - lowest decile) / lowest decile
    repeats: int

    def sample(self, *, silent: bool = False) -> Sample:
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
    samples: SamplesFile, points: Iterable[Point], *, layers: Sequence[int], model_layers: int
) -> list[MeasuredPoint]:
    """The points that were observed, for the whole model.

    With two layer counts a < b the model's remaining layers are added at the difference's slope:
    t = t_a + (model_layers - a) (t_b - t_a) / (b - a).
    """
    observed = [samples.seconds_by_point(count) for count in layers]
    found = []
    for point in points:
        seconds = [table.get(point.key, []) for table in observed]
        if all(seconds):
            found.append(_summary(point, seconds, layers, model_layers))
    return found


def undisturbed(seconds: Sequence[float]) -> float:
    """The lowest decile of repeated observations: other load only ever adds."""
    return float(np.quantile(np.asarray(seconds), 0.1))


def spread(seconds: Sequence[float]) -> float:
    """(median - lowest decile) / lowest decile: how far the observations lie apart."""
    low, middle = np.quantile(np.asarray(seconds), [0.1, 0.5])
    return float((middle - low) / low)


def _summary(
    point: Point, seconds: Sequence[Sequence[float]], layers: Sequence[int], model_layers: int
) -> MeasuredPoint:
    lows = [undisturbed(values) for values in seconds]
    total = lows[0]
    if len(layers) == 2:
        total += (model_layers - layers[0]) * (lows[1] - lows[0]) / (layers[1] - layers[0])
    return MeasuredPoint(
        point=point,
        seconds=total,
        spread=max(spread(values) for values in seconds),
        repeats=min(len(values) for values in seconds),
    )
