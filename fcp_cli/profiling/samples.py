"""A measurement request and its samples file: JSON lines, appended as it runs, so that an aborted run keeps them.

The first line describes the measurement; then there is a line per observation, transfer or memory reading; the last
line marks the end. A file without the end mark is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeAlias

import numpy as np

from fcp_cli.cost.fitting import LEAST_SAMPLES, Sample
from fcp_cli.cost.kernels import KernelTable
from fcp_cli.cost.profile import Sync, heads_degrees
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.points import P, Point, VisionPoint, heads_points, measurement_points, vision_points
from fcp_cli.util.files import reason_of, write_text_atomically
from fcp_cli.util.inputs import decode_json, read_json, read_text
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.validation import Count, NonEmptyText, NonNegative, Share, fields_of, require_shape, validated


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Model, device and packs to measure; only runs with the same subject may add to a samples file.

    Attributes:
        model: name or path for `load_model`.
        cluster: the profile's cluster; provides values that cannot be measured here.
        ranks: number of processes on all nodes, one per device or core; 1 emulates degrees above 1.
        nodes: number of nodes; with several, rings across nodes are measured, too.
        degrees: degrees to measure.
        max_length: tokens of the longest pack.
        device: `cpu`, `cuda` or `npu`, or `auto` for several nodes, whose devices are unknown here.
        recipe: recipe for the packs; precision, recomputation, loss and offloading affect times, the rest only memory.
        sync: sync of the plans.
        layers: layer counts to measure: the full model's, or two smaller ones to extrapolate from.
        vision_layers: block counts of the vision encoder, like `layers`; () without an encoder.
    """

    model: NonEmptyText
    cluster: NonEmptyText
    ranks: Count
    nodes: Count = 1
    degrees: tuple[Count, ...]
    max_length: Count
    device: NonEmptyText
    recipe: Recipe
    sync: Sync
    layers: tuple[Count, ...]
    vision_layers: tuple[Count, ...] = ()

    @property
    def emulate(self) -> bool:
        """Whether a single rank emulates ring members, without peers."""
        return self.ranks == 1

    def points(self) -> list[Point]:
        """Return the packs to measure: in rings inside nodes, across nodes, and with Ulysses."""
        if self.emulate:
            return measurement_points(self.max_length, self.degrees)
        inside = [degree for degree in self.degrees if degree <= self.ranks // self.nodes]
        across = [degree for degree in self.degrees if degree > 1] if self.nodes > 1 else []
        return [
            *measurement_points(self.max_length, inside),
            *measurement_points(self.max_length, across, crosses_nodes=True),
            *heads_points(self.max_length, inside, shareable(load_model(self.model), max(inside))),
        ]

    def vision_points(self) -> list[VisionPoint]:
        """Return the vision encoder calls to measure; [] without an encoder."""
        vision = load_model(self.model).vision
        if vision is None or not self.vision_layers:
            return []
        # A call has at most as many patches as a pack has tokens; InternVL's tiles all have the same size.
        return vision_points(self.max_length, mixed=vision.kind != "internvit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Subject):
    """A measurement request for the worker's ranks.

    Attributes:
        budget_seconds: time for observations, without process start-up.
        samples: samples file; only rank 0 writes it.
    """

    budget_seconds: float
    samples: Path

    def subject(self) -> Subject:
        """Return the request without budget and file."""
        return Subject(**fields_of(Subject, self))

    def write(self, path: Path) -> None:
        """Write the request for the worker's ranks, with absolute paths."""
        model = str(Path(self.model).resolve()) if Path(self.model).exists() else self.model
        document = {**asdict(self), "model": model, "samples": str(self.samples.resolve())}
        write_text_atomically(path, json.dumps(document))


def read_measurement(path: Path) -> Measurement:
    """Read a file written by `Measurement.write`."""
    document = read_json(path, error=ProfileError)
    budget_seconds, samples = document.pop("budget_seconds"), Path(document.pop("samples"))
    subject = validated(document, Subject, where=str(path), error=ProfileError)
    return Measurement(**fields_of(Subject, subject), budget_seconds=budget_seconds, samples=samples)


def model_figures(model: str) -> Mapping[str, Any]:
    """Return a model's shapes as JSON values; samples of other shapes belong to another model."""
    spec = asdict(load_model(model))
    figures: Mapping[str, Any] = decode_json(
        json.dumps({key: value for key, value in spec.items() if key not in ("sources", "aliases")})
    )
    return figures


def timed_settings(recipe: Recipe) -> dict[str, str]:
    """Return the recipe settings that affect the time of a pack; the others affect memory."""
    return {name: getattr(recipe, name) for name in ("precision", "recompute", "loss", "offload")}


def shareable(spec: ModelSpec, most: int) -> tuple[int, ...]:
    """Return the possible Ulysses degrees up to `most`; () if a layer has no heads to share."""
    if any(kind.attention not in ("full", "latent") for kind in spec.kinds):
        return ()
    return heads_degrees(spec.num_heads, spec.shared_kv_heads, most)


FORMAT: Final = "fcp-samples/1"


def _line(optional: Mapping[str, Any] | None = None, **required: Any) -> type[Any]:
    """Return a dataclass that validates a kind of line, from the types of its required and optional fields."""
    absent = [(name, rule, field(default=None)) for name, rule in (optional or {}).items()]
    return make_dataclass("Line", [("kind", str), *required.items(), *absent], frozen=True, kw_only=True, slots=True)


_Seconds: TypeAlias = tuple[NonNegative, ...]
# Lines used in fits, which have no other fields; other lines are descriptive.
_FITTED_LINES: Final[Mapping[str, type[Any]]] = {
    "observation": _line(point=NonEmptyText, layers=Count, seconds=_Seconds),
    "host": _line(point=NonEmptyText, layers=Count, seconds=_Seconds),
    "transfer": _line(tier=Literal["intra_node", "inter_node", "inter_node_cross_rail"], bytes=Count, seconds=_Seconds),
    "step": _line({"optimizer_share": Share}, layers=Count, seconds=_Seconds, state_bytes=NonNegative),
    "attention_kernels": _line(table=KernelTable),
}
_DESCRIBING_LINES: Final[Mapping[str, type[Any]]] = {
    "memory": _line({"layers": Count | None}, tokens=NonNegative, peak_bytes=NonNegative),
    "vision_memory": _line(patches=NonNegative, peak_bytes=NonNegative),
    "environment": _line({"at": str, "device_memory_bytes": NonNegative, "device": str}),
    "clocks": _line(when=str),
    "first_contact": _line({"bytes": _Seconds | None}, tier=str, seconds=_Seconds),
    "left_out": _line(points=tuple[str, ...]),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoint(Generic[P]):
    """All observations of a point; `SamplesFile.summary` reduces them to `seconds`."""

    point: P
    seconds: float
    repeats: int

    def record(self, predicted_seconds: float) -> dict[str, Any]:
        """Return its comparison with the prediction, for the measurement block."""
        return {
            "seconds": self.seconds,
            "predicted_seconds": predicted_seconds,
            "error_percent": 100.0 * (predicted_seconds / self.seconds - 1.0),
            "held_out": self.point.held_out,
            "repeats": self.repeats,
        }

    def sample(self: MeasuredPoint[Point], *, silent: bool = False) -> Sample:
        return Sample(
            lengths=self.point.lengths,
            degree=self.point.degree,
            seconds=self.seconds,
            crosses_nodes=self.point.crosses_nodes,
            heads_degree=self.point.heads_degree,
            silent=silent and self.point.degree > 1,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesFile:
    """Content of a samples file: the measurement, the model's shapes at that time, and the lines."""

    subject: Subject
    figures: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    path: Path = Path("profile.samples.jsonl")

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("kind") == kind]

    @property
    def finished(self) -> bool:
        # A measurement resumed after its end is unfinished until it records another end.
        ends = [line["kind"] for line in self.lines if line.get("kind") in ("finished", "resumed")]
        return bool(ends) and ends[-1] == "finished"

    @property
    def shares_cores(self) -> bool:
        """Whether ranks shared CPU cores during the measurement."""
        return any(line.get("shares_cores") for line in self.of_kind("environment"))

    @property
    def on_accelerators(self) -> bool:
        return any(line.get("device", "cpu") != "cpu" for line in self.of_kind("environment"))

    @property
    def num_fitted(self) -> int:
        """Number of observed points available to the fit."""
        seen = {line["point"] for line in self.of_kind("observation")}
        return sum(point.key in seen and not point.held_out for point in self.subject.points())

    def summary(self, seconds: Sequence[float]) -> float:
        """Reduce repeated observations to one value: the lowest decile, since other load only slows down.

        If ranks share cores, the median is what a job sees. It is also used on accelerators, whose fastest samples ran
        at clocks that a job cannot sustain.
        """
        return float(np.quantile(np.asarray(seconds), 0.5 if self.shares_cores or self.on_accelerators else 0.1))

    def kernel_table(self) -> KernelTable | None:
        """Return the latest attention kernel table, or None."""
        rules, lines = _FITTED_LINES["attention_kernels"], self.of_kind("attention_kernels")
        return validated(lines[-1], rules, where=str(self.path), error=ProfileError).table if lines else None

    def seconds_by_point(self, layers: int, kind: str = "observation") -> dict[str, list[float]]:
        """Return the seconds of each point with this layer count: observed, or of the `host` that issued it."""
        found: dict[str, list[float]] = {}
        for line in self.of_kind(kind):
            if line["layers"] == layers:
                found.setdefault(line["point"], []).extend(line["seconds"])
        return found


def prepare_samples(measurement: Measurement) -> bool:
    """Start a samples file, or return True to resume an unfinished one; a complete one is replaced."""
    measurement.points()  # validates `max_length` before writing
    path = measurement.samples
    if path.exists():
        samples = read_samples(path)
        if not samples.finished or samples.num_fitted < LEAST_SAMPLES:
            _require_same(measurement, samples)
            append_line(path, {"kind": "resumed"})
            return True
    begin_samples(measurement)
    return False


def begin_samples(measurement: Measurement) -> None:
    """Write the first line of a samples file."""
    subject = measurement.subject()
    header = {"format": FORMAT, **asdict(subject), "figures": model_figures(subject.model), "emulate": subject.emulate}
    write_text_atomically(measurement.samples, json.dumps(header) + "\n")


def _require_same(measurement: Measurement, samples: SamplesFile) -> None:
    wanted = {**_compared(measurement.subject()), "figures": model_figures(measurement.model)}
    found = {**_compared(samples.subject), "figures": samples.figures}
    for key in sorted(wanted):
        if wanted[key] != found[key]:
            raise ProfileError(
                f"{measurement.samples} holds an unfinished measurement with another {key} ({_short(found[key])}, not "
                f"{_short(wanted[key])}); finish that one, or remove the file to start over"
            )


def _compared(subject: Subject) -> dict[str, Any]:
    """Return the settings that must match to resume: of the recipe, only those that affect times."""
    compared = fields_of(Subject, subject)
    del compared["recipe"], compared["sync"]
    return {**compared, **timed_settings(subject.recipe)}


def _short(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def read_samples(path: Path) -> SamplesFile:
    """Read a samples file; a truncated last line is skipped."""
    if mistaken := another_kind(path, "samples"):
        raise ProfileError(mistaken)
    rows = read_text(path, error=ProfileError, label="the samples ").splitlines()
    header, *lines = [_parse(row) for row in rows] or [None]
    if header is None or header.pop("format", None) != FORMAT:
        raise ProfileError(f"{path} holds no samples of 'fcp profile' ({FORMAT}); remove it, or give another -o")
    figures = header.pop("figures", {})
    header.pop("emulate", None)  # derived from `ranks`
    remedy = "remove it, or give another -o"
    subject = validated(header, Subject, where=f"{path}, first line", error=ProfileError, remedy=remedy)
    for number, line in enumerate(lines, start=2):
        where, kind = f"{path}, line {number}", "" if line is None else str(line.get("kind"))
        if rules := _FITTED_LINES.get(kind):
            validated(line, rules, where=where, error=ProfileError, remedy=remedy)
        if shape := _DESCRIBING_LINES.get(kind):
            try:
                require_shape(line, shape)
            except ValueError as error:
                raise ProfileError(f"{where}: {error}; {remedy}") from error
    return SamplesFile(subject=subject, figures=figures, lines=[line for line in lines if line is not None], path=path)


def _parse(row: str) -> dict[str, Any] | None:
    try:
        line = decode_json(row)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line and close the file, so that the line survives a crash."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ProfileError(f"cannot write the samples {path}: {reason_of(error, path.parent)}") from error


def measured_points(
    samples: SamplesFile, points: Iterable[P], *, layers: Sequence[int], model_layers: int, kind: str = "observation"
) -> list[MeasuredPoint[P]]:
    """Return the observed points (or those that the `host` was timed on), extrapolated to the full model.

    With two layer counts a < b, remaining layers are extrapolated linearly:
    t = t_a + (model_layers - a) (t_b - t_a) / (b - a).
    """
    observed = [samples.seconds_by_point(count, kind) for count in layers]
    found = []
    for point in points:
        seconds = [table.get(point.key, []) for table in observed]
        if not all(seconds):
            continue
        total, *more = [samples.summary(values) for values in seconds]
        if more:
            total += (model_layers - layers[0]) * (more[0] - total) / (layers[1] - layers[0])
        found.append(MeasuredPoint(point=point, seconds=total, repeats=min(map(len, seconds))))
    return found
