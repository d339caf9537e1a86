"""The packs and encoder calls to measure: which there are, in which order they are observed, and which fit.

Fitted are lengths in powers of two and packs of equal sequences, and encoder calls of single parts of growing size and
of many equal parts. Sizes in between and mixtures are held out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar

from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import patch_bytes
from fcp_cli.memory.items import RESERVE_FRACTION, MemoryItem, RankMemory, precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import ModelSpec

LEAST_LENGTH = 64  # below it, the fixed cost dominates


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A pack to measure at a degree; held-out packs are compared, never fitted."""

    lengths: tuple[int, ...]
    degree: int
    held_out: bool = False
    crosses_nodes: bool = False
    heads_degree: int = 1

    @property
    def key(self) -> str:
        """Name of the point in the samples file."""
        sets = f"h{self.heads_degree}" if self.heads_degree > 1 else ""
        return f"{self.degree}{'x' if self.crosses_nodes else ''}{sets}:{'+'.join(map(str, self.lengths))}"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def work(self) -> float:
        """Relative cost of a layer, without a unit."""
        return (sum(length * length for length in self.lengths) + 2048 * self.tokens) / self.degree


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionPoint:
    """A vision encoder call to measure: square parts, given by their sides in patches.

    `trained` calls include a backward pass.
    """

    sides: tuple[int, ...]
    trained: bool
    held_out: bool = False

    @property
    def key(self) -> str:
        """Name of the point in the samples file."""
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
        """Relative cost of a layer, without a unit."""
        forward = sum(patches * patches for patches in self.part_patches) + 2048 * self.patches
        return float((3 if self.trained else 1) * forward)


P = TypeVar("P", Point, VisionPoint)


def measurement_points(max_length: int, degrees: Sequence[int], *, crosses_nodes: bool = False) -> list[Point]:
    """Return the points of a measurement, cheapest first, fitted and held out, for each degree.

    Fitted: single sequences of 64, 128, ... max_length tokens, and packs of equal sequences. Held out: lengths in
    between, and random packs from a fixed seed.
    """
    if max_length < 8 * LEAST_LENGTH:
        raise UsageError(f"--max-length is {max_length}; it must be at least {8 * LEAST_LENGTH}")
    sixteenth, quarter = max_length // 16, max_length // 4
    packs = [(LEAST_LENGTH,) * 8, (sixteenth,) * 8, (sixteenth,) * 16, (quarter,) * 3]
    fitted = _singles(max_length) + [pack for pack in dict.fromkeys(packs) if sum(pack) <= max_length]
    held_out = _between(max_length) + _random_packs(max_length)
    points = [
        Point(lengths=lengths, degree=degree, held_out=is_held_out, crosses_nodes=crosses_nodes and degree > 1)
        for degree in degrees
        for lengths, is_held_out in [*((pack, False) for pack in fitted), *((pack, True) for pack in held_out)]
    ]
    return sorted(points, key=lambda point: (point.work, point.key))


def heads_points(max_length: int, degrees: Sequence[int], heads_degrees: Sequence[int]) -> list[Point]:
    """Return the points with Ulysses, cheapest first, for all possible pairs of degree and Ulysses degree.

    Fitted: three lengths of each pure Ulysses group. Held out: four lengths in between, also of Ulysses groups in a
    ring.
    """
    groups = [(degree, shared) for degree in degrees for shared in heads_degrees if degree % shared == 0]
    points = [
        Point(lengths=lengths, degree=degree, heads_degree=shared, held_out=is_held_out)
        for degree, shared in groups
        for lengths, is_held_out in [
            *((one, False) for one in _singles(max_length)[:-6:-2] if degree == shared),
            *((one, True) for one in _between(max_length)[-4:]),
        ]
    ]
    return sorted(points, key=lambda point: (point.work, point.key))


def _singles(max_length: int) -> list[tuple[int, ...]]:
    lengths: list[tuple[int, ...]] = []
    length = LEAST_LENGTH
    while length < max_length:
        lengths.append((length,))
        length *= 2
    return [*lengths, (max_length,)]


def _between(max_length: int) -> list[tuple[int, ...]]:
    lengths: list[tuple[int, ...]] = []
    length = 96
    while length < max_length:
        # Like real lengths, not a multiple of any kernel's tile: powers of two would flatter the fit.
        lengths.append((length + length % 7,))
        length *= 2
    return lengths[1:]


def _random_packs(max_length: int, packs: int = 5) -> list[tuple[int, ...]]:
    """Draw long-tailed packs from a fixed seed."""
    draw = random.Random(max_length)
    found = []
    for number in range(packs):
        room = max_length * (number + 1) // packs
        lengths: list[int] = []
        while room >= LEAST_LENGTH and len(lengths) < 12:
            length = min(room, int(LEAST_LENGTH * (max_length / LEAST_LENGTH) ** draw.random()))
            lengths.append(length)
            room -= length
        found.append(tuple(lengths))
    return found


LEAST_SIDE = 8  # patches
MOST_PATCHES = 65_536  # the largest image that Qwen3-VL's published settings do not shrink
_FITTED_SIDES = (8, 16, 22, 32, 64, 128, 256)
_HELD_OUT_SIDES = (12, 24, 44, 88, 176)


def vision_points(max_patches: int, *, mixed: bool) -> list[VisionPoint]:
    """Return vision encoder calls, cheapest first: fitted and held out, frozen (forward only) and trained.

    Sides are even, since all families merge 2 x 2 patches into a token.

    Args:
        max_patches: maximum number of patches per call.
        mixed: whether a call may have parts of different sizes.
    """
    most = min(max_patches, MOST_PATCHES)
    fitted = [*_single_parts(_FITTED_SIDES, most), *(_parts_of(side, most // share) for side, share in _FITTED_PACKS)]
    held_out = [*_single_parts(_HELD_OUT_SIDES, most), *(_parts_of(side, most // share) for side, share in _HELD_PACKS)]
    if mixed:
        held_out += [sides for sides in _MIXTURES if sum(side * side for side in sides) <= most]
    points = [
        VisionPoint(sides=sides, trained=trained, held_out=is_held_out)
        for trained in (False, True)
        for group, is_held_out in ((fitted, False), (held_out, True))
        for sides in dict.fromkeys(group)
        if sides
    ]
    return sorted(points, key=lambda point: (point.work, point.key))


# (side, n): as many parts of this side as fit into 1/n of the maximum patches. Equal patches in small and large parts
# separate the linear from the quadratic coefficient.
_FITTED_PACKS = ((8, 1), (8, 4), (16, 1), (16, 2), (32, 1))
_HELD_PACKS = ((12, 1), (24, 1), (12, 3))
_MIXTURES = ((8, 12, 16), (8, 8, 24, 12), (32, 16, 16, 8, 8), (64, 24, 24, 44), (128, 64, 32, 32, 16))


def _single_parts(sides: Sequence[int], most_patches: int) -> list[tuple[int, ...]]:
    return [(side,) for side in sides if side * side <= most_patches]


def _parts_of(side: int, patches: int) -> tuple[int, ...]:
    """Return as many parts of this side as fit into `patches`; () if fewer than two fit."""
    number = patches // (side * side)
    return (side,) * number if number > 1 else ()


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Memory of a measuring rank.

    It holds its layers and gradients unsharded, even if the recipe shards them, so that no ring member waits for
    weights. The optimizer is added last, for as much of the model as a rank of the job has.

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
        return 2.0 * precision_of(self.recipe).weight * blocks.parameters  # weights and gradients

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

    def fitting(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return the packs whose shard is estimated to fit into a rank's memory together with the model, in order.

        All ranks skip the same points: a failed allocation on one rank would abort all.
        """
        room = self.room_tokens
        return tuple(point for point in points if -(-point.tokens // point.degree) <= room)

    def fitting_calls(self, points: Sequence[VisionPoint]) -> tuple[VisionPoint, ...]:
        """Return the encoder calls whose activations are estimated to fit together with the model, in order."""
        vision = self.spec.vision
        if vision is None:
            return ()
        room = self.capacity_bytes - self.memory().total_bytes(0)
        blocks = self.vision_layers or vision.depth
        most_patches = room / (blocks * patch_bytes(vision, precision_of(self.recipe)))
        return tuple(point for point in points if point.patches <= most_patches)
