"""The value of a measurement: `fcp profile` chooses it, the worker obeys it, and a samples file begins with it."""

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
    """A model, a device and the packs to measure; a run may only add to samples of the same subject.

    Attributes:
        model: name or path, as `load_model` takes it.
        cluster: name of the profile's cluster; its figures replace those that cannot be measured here.
        ranks: processes on all nodes, one per device or core; 1 emulates degrees above 1.
        nodes: machines; with several, rings across nodes are measured too.
        degrees: the degrees to measure.
        max_length: tokens of the longest sequence and pack.
        device: `cpu`, `cuda` or `npu`; with several nodes, which this machine knows nothing of, also `auto`.
        recipe: the recipe under which packs run: its precision, recomputation, loss and offloading; the rest of it is
            of memory.
        sync: the sync of the plans that the profile is for.
        layers: layer counts to measure with: the whole model's, or two smaller ones to extrapolate from.
        vision_layers: block counts of the vision encoder, as `layers`; none if the model has none.
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
        """True if one rank simulates a member of every ring, without peers."""
        return self.ranks == 1

    def points(self) -> list[Point]:
        """Return the packs to measure: in rings inside nodes, then across them, then on ranks that share heads."""
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
        """Return the calls of the vision encoder to measure; none if the model has none."""
        vision = load_model(self.model).vision
        if vision is None or not self.vision_layers:
            return []
        # A call runs as many patches as a pack has tokens at most; InternVL's tiles all have one size.
        return vision_points(self.max_length, mixed=vision.kind != "internvit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Subject):
    """A request to measure a subject, as the ranks of the worker read it.

    Attributes:
        budget_seconds: how long observations may take; the start of the processes does not count.
        samples: file of the observations; only rank 0 writes it.
    """

    budget_seconds: float
    samples: Path

    def subject(self) -> Subject:
        """Return the settings of the measurement, without its budget and file."""
        return Subject(**fields_of(Subject, self))

    def write(self, path: Path) -> None:
        """Write the request that every rank of the worker reads, from any folder."""
        model = str(Path(self.model).resolve()) if Path(self.model).exists() else self.model
        document = {**asdict(self), "model": model, "samples": str(self.samples.resolve())}
        write_text_atomically(path, json.dumps(document))


def read_measurement(path: Path) -> Measurement:
    """Read the file of `Measurement.write`."""
    document = read_json(path, error=ProfileError)
    budget_seconds, samples = document.pop("budget_seconds"), Path(document.pop("samples"))
    subject = validated(document, Subject, where=str(path), error=ProfileError)
    return Measurement(**fields_of(Subject, subject), budget_seconds=budget_seconds, samples=samples)


def model_figures(model: str) -> Mapping[str, Any]:
    """Return the figures of a model as JSON holds them: samples of other figures are of another model."""
    spec = asdict(load_model(model))
    figures: Mapping[str, Any] = decode_json(
        json.dumps({key: value for key, value in spec.items() if key not in ("sources", "aliases")})
    )
    return figures


def timed_settings(recipe: Recipe) -> dict[str, str]:
    """Return the settings of a recipe that decide the time of a pack; the others decide memory."""
    return {name: getattr(recipe, name) for name in ("precision", "recompute", "loss", "offload")}


def shareable(spec: ModelSpec, most: int) -> tuple[int, ...]:
    """Return how many ranks, up to `most`, can share a model's heads; none if a layer has no heads to share."""
    if any(kind.attention not in ("full", "latent") for kind in spec.kinds):
        return ()
    return heads_degrees(spec.num_heads, spec.shared_kv_heads, most)


def default_degrees(ranks: int, most: int = 8) -> tuple[int, ...]:
    """Return the degrees to measure: all up to 4, then 6 and 8; a single rank emulates them."""
    reach = ranks if ranks > 1 else most
    return tuple(degree for degree in (1, 2, 3, 4, 6, 8) if degree <= reach)


def default_vision_layers(spec: ModelSpec, layers: Sequence[int], *, device: str) -> tuple[int, ...]:
    """Return all blocks of the encoder if the whole language model is measured, else two counts; none without one.

    The deepstack mergers lie behind the first blocks, so that both counts have all of them; both have whole periods of
    blocks with and without windows.
    """
    if spec.vision is None:
        return ()
    period = spec.vision.block_period
    least = min(-(-max(1, len(spec.vision.deepstack_layers)) // period) * period, spec.vision.depth)
    more = -(-(1 if device == "cpu" else 4) // period) * period
    most = min(least + more, spec.vision.depth)
    return (spec.vision.depth,) if len(layers) == 1 or least == most else (least, most)
