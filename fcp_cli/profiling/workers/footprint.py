"""Memory of measuring ranks: how many layers and which packs fit, and how much of an optimizer.

A worker rank holds its measured layers and gradients unsharded, even if the recipe shards them, so that no ring member
waits for weights. The optimizer is added last, for as much of the model as a rank of the job has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.table import RESERVE_FRACTION, MemoryItem, RankMemory
from fcp_cli.memory.vision import patch_bytes
from fcp_cli.models.model import ModelSpec
from fcp_cli.profiling.fits.points import LEAST_LENGTH, Point, VisionPoint
from fcp_cli.recipe import PrecisionName, Recipe

_STATE_SHARE = 2 / 3  # share of a rank's memory for training an unreduced model
_LAYER_COUNTS = (6, 4, 3)  # the largest that fits is measured, and a third of it
WEIGHT_BYTES: Mapping[PrecisionName, int] = {"bf16": 2, "amp": 4, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a worker rank.

    Attributes:
        spec: full model.
        recipe: recipe of the packs.
        layers: number of language model layers built.
        vision_layers: number of encoder blocks built.
        ranks: number of measuring ranks.
        on_cpu: whether they run on CPUs.
        device_bytes: memory of a rank.
    """

    spec: ModelSpec
    recipe: Recipe
    layers: int
    vision_layers: int = 0
    ranks: int = 1
    on_cpu: bool = False
    device_bytes: float

    @property
    def capacity_bytes(self) -> float:
        return self.device_bytes * (1 - RESERVE_FRACTION)

    @property
    def parameters(self) -> float:
        """Parameters of the built language model."""
        return float(self._built.parameters)

    @property
    def _built(self) -> ModelSpec:
        return replace(self.spec, num_layers=self.layers, vision=None)

    @property
    def _encoder_bytes(self) -> float:
        vision = self.spec.vision
        if vision is None or not self.vision_layers:
            return 0.0
        blocks = replace(vision, depth=self.vision_layers)
        return 2.0 * WEIGHT_BYTES[self.recipe.precision] * blocks.parameters  # weights and gradients

    def memory(self) -> RankMemory:
        """Return the memory while packs run: model and encoder, without optimizer."""
        whole = replace(self.recipe, zero_stage=0, shard_ranks=None, freeze_vision=False)
        found = rank_memory(
            self._built,
            whole,
            sync="iteration",
            ranks=max(2, self.ranks),  # rings, or an emulated member of one
            on_cpu=self.on_cpu or self.ranks == 1,
            peers=self.ranks - 1,
            sharing=self.ranks,
        )
        encoder = MemoryItem(name="vision encoder", fixed_bytes=self._encoder_bytes)
        moments = tuple(
            replace(moment, items=(*(item for item in moment.items if item.name != "optimizer"), encoder))
            for moment in found.moments
        )
        return RankMemory(moments=moments)

    @property
    def room_tokens(self) -> int:
        """Maximum tokens of a pack per rank."""
        return self.memory().tokens(self.capacity_bytes)

    @property
    def fits(self) -> bool:
        """Whether packs can be measured: half of the memory must remain for tokens."""
        return self.memory().total_bytes(LEAST_LENGTH) <= self.capacity_bytes / 2

    @property
    def optimizer_bytes(self) -> float:
        """AdamW moments of all built parameters, and master weights if the recipe has them."""
        precision = precision_of(self.recipe)
        return (precision.moments + precision.master) * self.parameters

    def optimizer_share(self, shards: int) -> float:
        """Return the share of parameters that the worker's optimizer updates.

        It is that of a rank of the job with its optimizer sharding, limited by memory.

        Args:
            shards: number of optimizer shards; 1: not sharded.
        """
        room = self.capacity_bytes - self.memory().total_bytes(0)
        return min(1.0 / shards, max(0.0, room) / self.optimizer_bytes)


def default_layers(
    spec: ModelSpec, recipe: Recipe, *, device: str, device_bytes: float, ranks: int = 1
) -> tuple[int, ...]:
    """Return all layers if training them leaves memory for packs, else two counts that do."""

    def footprint(layers: int) -> Footprint:
        blocks = 0 if spec.vision is None else max(1, spec.vision.depth * layers // spec.num_layers)
        return Footprint(
            spec=spec,
            recipe=recipe,
            layers=layers,
            vision_layers=blocks,
            ranks=ranks,
            on_cpu=device == "cpu",
            device_bytes=device_bytes,
        )

    whole = footprint(spec.num_layers)
    if whole.memory().total_bytes(LEAST_LENGTH) + whole.optimizer_bytes <= _STATE_SHARE * device_bytes:
        return (spec.num_layers,)
    period = spec.layer_period  # keeps the ratio of layer kinds
    if device == "cpu":
        return (period, 2 * period)
    counts = [count for count in _LAYER_COUNTS if count * period <= spec.num_layers]
    most = next((count for count in counts if footprint(count * period).fits), 2)
    return (max(1, most // 3) * period, most * period)


def points_that_fit(points: Sequence[Point], footprint: Footprint) -> tuple[Point, ...]:
    """Return the points whose shard is estimated to fit into a rank's memory together with the model, in order.

    All ranks skip the same points: a failed allocation on one rank would abort all.
    """
    room = footprint.room_tokens
    return tuple(point for point in points if -(-point.tokens // point.degree) <= room)


def vision_points_that_fit(points: Sequence[VisionPoint], footprint: Footprint) -> tuple[VisionPoint, ...]:
    """Return the encoder calls whose activations are estimated to fit together with the model."""
    vision = footprint.spec.vision
    if vision is None:
        return ()
    room = footprint.capacity_bytes - footprint.memory().total_bytes(0)
    blocks = footprint.vision_layers or vision.depth
    most_patches = room / (blocks * patch_bytes(vision, precision_of(footprint.recipe)))
    return tuple(point for point in points if point.patches <= most_patches)
