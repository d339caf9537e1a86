"""A measurement request: chosen by `fcp profile`, executed by the worker, and stored at the start of a samples file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fcp_cli.cost.profile import Sync, heads_degrees
from fcp_cli.errors import ProfileError
from fcp_cli.files import write_text_atomically
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.fits.points import Point, VisionPoint, heads_points, measurement_points, vision_points
from fcp_cli.reading.documents import decode_json, read_json
from fcp_cli.recipe import Recipe
from fcp_cli.validation import Count, NonEmptyText, fields_of, validated


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


def default_degrees(ranks: int, most: int = 8) -> tuple[int, ...]:
    """Return the default degrees: all up to 4, then 6 and 8; a single rank emulates them."""
    reach = ranks if ranks > 1 else most
    return tuple(degree for degree in (1, 2, 3, 4, 6, 8) if degree <= reach)


def default_vision_layers(spec: ModelSpec, layers: Sequence[int], *, device: str) -> tuple[int, ...]:
    """Return the encoder's block counts: all if the full language model is measured, else two counts; () without one.

    Deepstack mergers follow the first blocks, so both counts include all of them; both are multiples of the period of
    windowed blocks.
    """
    if spec.vision is None:
        return ()
    period = spec.vision.block_period
    least = min(-(-max(1, len(spec.vision.deepstack_layers)) // period) * period, spec.vision.depth)
    more = -(-(1 if device == "cpu" else 4) // period) * period
    most = min(least + more, spec.vision.depth)
    return (spec.vision.depth,) if len(layers) == 1 or least == most else (least, most)
