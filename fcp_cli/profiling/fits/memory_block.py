"""Memory block of a measured profile: measured bytes per token, everything else from the memory model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fcp_cli.cost.profile import Memory, Sync
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, fitting_recipe
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.table import RESERVE_FRACTION, RankMemory
from fcp_cli.memory.trained import backward_of
from fcp_cli.memory.vision import vision_bytes
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec
from fcp_cli.profiling.fits.measurement import timed_settings
from fcp_cli.profiling.fits.samples import SamplesFile
from fcp_cli.profiling.fits.vision_fit import measured_bytes_per_patch, slope_of_peaks
from fcp_cli.recipe import Recipe, RecipeRequest


def place_of(cluster: str, *, ranks: int, nodes: int, device_bytes: float, on_cpu: bool) -> JobRanks:
    """Return the ranks of a profile's memory: those measured, or the full cluster that a single rank represents."""
    per_node = ranks // nodes
    if ranks == 1 and not on_cpu:
        like = load_cluster(cluster)
        ranks, per_node = like.num_devices, like.devices_per_node
    return JobRanks(
        num_ranks=ranks,
        ranks_per_node=per_node,
        capacity_bytes=device_bytes * (1 - RESERVE_FRACTION),
        on_cpu=on_cpu,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """Memory of a profile.

    Attributes:
        spec, recipe, sync, place: model, recipe, sync and ranks of the job.
        samples: samples with peak memory.
    """

    spec: ModelSpec
    recipe: Recipe
    sync: Sync
    place: JobRanks
    samples: SamplesFile

    @property
    def estimate(self) -> RankMemory:
        return self.place.memory(self.spec, self.recipe, self.sync)

    def block(self) -> Memory:
        """Return the memory block, with measured bytes per token if peaks of growing packs determine them.

        Bytes of a visual token include its patches, unless the encoder is frozen.
        """
        memory = self.estimate.as_profile_memory(self.place.capacity_bytes)
        measured = text_bytes_per_token(self.samples, self.spec)
        if measured is None:
            return memory
        if self.place.num_ranks > 1:  # packs were measured without rings
            measured += self._more_in_rings()
        return replace(memory, bytes_per_token=measured + self._visual_token_bytes())

    def _more_in_rings(self) -> float:
        """Return the estimated extra bytes per token of a ring member.

        Ring buffers peak in attention's backward, whereas a rank usually peaks at another moment.
        """
        whole = replace(self.recipe, zero_stage=0, shard_ranks=None)  # sharding does not change the bytes of tokens
        alone, member = (rank_memory(self.spec, whole, sync="iteration", ranks=ranks) for ranks in (1, 2))
        return max(one.bytes_per_token for one in member.moments) - max(one.bytes_per_token for one in alone.moments)

    def _visual_token_bytes(self) -> float:
        vision = self.spec.vision
        if vision is None or not backward_of(self.spec, self.recipe).vision.inputs:
            return 0.0
        per_patch = measured_bytes_per_patch(self.samples)
        if per_patch is None:
            return vision_bytes(self.spec, self.recipe, precision_of(self.recipe))
        return vision.merge_size**2 * per_patch

    def record(self, tokens: int) -> Mapping[str, Any]:
        """Return the estimated memory of a rank with `tokens` tokens, for the measurement block."""
        return {
            "ranks": self.place.num_ranks,
            "at_tokens": tokens,
            "items_bytes": self.estimate.items(tokens),
        }

    def fitting(self) -> FittedRecipe:
        """Return a recipe that fits with the same times: settings that affect times are unchanged."""
        asked = RecipeRequest.to_train_as(self.recipe, **timed_settings(self.recipe))
        return fitting_recipe(self.spec, asked, self.place)

    def warnings(self, found: Memory) -> list[str]:
        """Return warnings if the model leaves no memory for tokens, with a recipe that fits."""
        if (found.tokens_per_rank() or 0) >= 1:
            return []
        size = f"{found.model_state_bytes / 1e9:.1f} of the {found.capacity_bytes / 1e9:.1f} GB that a rank may use"
        does_not = f"{self.spec.name} does not fit under {self.recipe.describe()}: it takes {size}"
        other = self.fitting()
        if other.tokens >= 1:
            command = shlex.join(["fcp", "profile", "--from-samples", str(self.samples.path), *other.flags()])
            return [f"{does_not}; {other.recipe.describe()} leaves {other.tokens:,} tokens per rank: {command}"]
        thriftiest = fitting_recipe(self.spec, RecipeRequest.to_train_as(self.recipe), self.place)
        if thriftiest.tokens >= 1:
            command = shlex.join(["fcp", "profile", *thriftiest.flags(), "--fresh"])
            return [
                f"{does_not}; {thriftiest.recipe.describe()} leaves {thriftiest.tokens:,} tokens per rank, and needs "
                f"new times: {command}"
            ]
        return [
            f"{does_not}, and no recipe would on {self.place.num_ranks} ranks; plan for more ranks, or cut the model "
            "with 'fcp profile --analytic --tensor-parallel T'"
        ]


def text_bytes_per_token(samples: SamplesFile, spec: ModelSpec) -> float | None:
    """Return the full language model's bytes per token; None if peaks do not determine them.

    With two layer counts, remaining layers are extrapolated linearly.
    """
    layers = samples.subject.layers
    slopes = [slope_of_peaks(readings(samples, count)) for count in layers]
    if any(slope is None for slope in slopes):
        return None
    first, *others = (slope for slope in slopes if slope is not None)
    if not others:
        return first
    per_layer = (others[0] - first) / (layers[1] - layers[0])
    return first + (spec.num_layers - layers[0]) * max(0.0, per_layer)


def readings(samples: SamplesFile, layers: int) -> list[tuple[float, float]]:
    """Return (tokens, peak bytes) of single-rank packs with this layer count."""
    most = max(samples.subject.layers)
    return [
        (line["tokens"], line["peak_bytes"])
        for line in samples.of_kind("memory")
        if int(line.get("layers", most)) == layers
    ]
