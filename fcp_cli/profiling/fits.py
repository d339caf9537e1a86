"""Fits a cost profile to samples; its measurement block records samples, machine and fit errors.

Memory is measured bytes per token, and everything else of the memory model. Times are measured with all weights
trained, and scaled for a job that trains part of the model. A vision encoder is fitted trained and frozen.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fcp_cli import __version__
from fcp_cli.cost.fitting import (
    LEAST_SAMPLES,
    Fit,
    Sample,
    VisionCosts,
    fit_groups,
    fit_vision,
    mean_absolute_percentage,
    non_negative_least_squares,
    predicted_seconds,
)
from fcp_cli.cost.kernels import KernelTable
from fcp_cli.cost.profile import Bandwidth, Coefficients, CostProfile, Heads, Memory, Sync, dump_cost_profile
from fcp_cli.cost.recipe import Recipe, RecipeRequest, check_recipe
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.memory.activations import vision_bytes
from fcp_cli.memory.fitting import FittedRecipe, JobRanks, fitting_recipe
from fcp_cli.memory.items import RESERVE_FRACTION, RankMemory, precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import backward_of
from fcp_cli.models.cluster import THIS_MACHINE, load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.computed import analytic_profile, counted_heads, messages_per_halo, messages_per_hop
from fcp_cli.profiling.points import Point, VisionPoint
from fcp_cli.profiling.samples import MeasuredPoint, SamplesFile, measured_points, timed_settings

_DIGITS = 6
_NAMED_POINTS = 5


_ACROSS_NODES = ("inter_node", "inter_node_cross_rail")


def recipe_of(samples: SamplesFile, request: RecipeRequest) -> tuple[Recipe, Sync]:
    """Return recipe and sync of a profile: as measured, overridden by the request."""
    measured = samples.subject
    recipe = request.applied_to(measured.recipe)
    was, asked = timed_settings(measured.recipe), timed_settings(recipe)
    for name in was:
        if was[name] != asked[name]:
            raise UsageError(
                f"--{name} {asked[name]}: the samples were measured with --{name} {was[name]}, and times differ; "
                f"measure with 'fcp profile --{name} {asked[name]}'"
            )
    sync = "microbatch" if recipe.zero_stage == 3 else measured.sync
    check_recipe(recipe, sync=sync)
    return recipe, sync


def profile_from_samples(samples: SamplesFile, *, request: RecipeRequest | None = None) -> CostProfile:
    """Fit a cost profile; its measurement block records hardware, versions, points, errors and warnings.

    Any observations yield a profile. If packs are too few or too similar to fit, the analytic coefficients are scaled
    to them. If the recipe leaves no memory for tokens, a warning names one that does.

    Args:
        samples: samples of a measurement; a vision encoder is timed both trained and frozen.
        request: recipe settings that override the measured ones; settings that affect times cannot change.
    """
    subject = samples.subject
    spec = load_model(subject.model)
    environments = samples.of_kind("environment")
    if not environments:
        raise ProfileError("the samples hold no measurement yet: the worker never began; run 'fcp profile' again")
    recipe, sync = recipe_of(samples, request or RecipeRequest())
    measured = measured_points(samples, subject.points(), layers=subject.layers, model_layers=spec.num_layers)
    timed = measured_recipe(spec, recipe)
    prior = _prior(samples, spec, timed, sync, shares_heads=any(one.point.heads_degree > 1 for one in measured))
    prior = prior.with_coefficients(lambda c: _with_host(c, samples, spec))
    fit, warnings = _fit(samples, measured, prior)
    predicted = predicted_seconds([point.sample(silent=subject.emulate) for point in measured], fit.profile)
    vision = fit_vision_samples(samples, spec)
    encoder = vision.get("frozen" if timed.freeze_vision else "trained")
    memory = _memory_figures(samples, spec, recipe, sync)
    block = memory.block()
    profile = replace(fit.profile, origin="measured", memory=block, recipe=recipe, sync=sync)
    if subject.nodes == 1 and subject.cluster == THIS_MACHINE:
        profile = _on_one_node(profile)
    if encoder is not None:
        profile = with_vision(profile, encoder.costs)
    computed = (_computed(samples, spec, one, sync) for one in (timed, recipe))
    profile, scaled = scaled_to_trained(profile, *computed)
    if profile.heads is not None:
        counted = (counted_heads(spec, one, message_seconds=1.0) for one in (timed, recipe))
        profile = replace(profile, heads=heads_of_trained(profile.heads, *counted))
    measurement = {
        **_circumstances(samples, environments[-1]),
        **_errors(measured, predicted),
        "held_out_error_percent_by_model": fit.held_out_percent,
        "assumed": [*fit.kept, *_assumed(samples, spec, encoder), *filter(None, [scaled])],
        "warnings": [*warnings, *memory.warnings(block)] or None,
        "memory": memory.record(max(1, block.tokens_per_rank() or 0)),
        # With two layer counts, readings are those of the larger; the line for the full model does not predict them.
        "memory_readings": compared_peaks(
            "tokens",
            readings(samples, max(subject.layers)),
            text_bytes_per_token(samples, spec) if len(subject.layers) == 1 else None,
        ),
        "vision_encoder": _vision_record(samples, vision, timed.freeze_vision) if spec.vision is not None else None,
        "points": [
            _described(one.point) | one.record(float(seconds)) for one, seconds in zip(measured, predicted, strict=True)
        ],
    }
    profile = replace(profile, measurement=_rounded(measurement), attention_kernels=_kernels(samples))
    return replace(profile, text=dump_cost_profile(profile))


def _kernels(samples: SamplesFile) -> KernelTable | None:
    table = samples.kernel_table()
    if table is None:
        return None
    names = ("forward_seconds", "backward_seconds", "first_seconds")
    timings = (replace(one, **{name: _rounded(getattr(one, name)) for name in names}) for one in table.timings)
    return replace(table, timings=tuple(timings))


def _fit(
    samples: SamplesFile, measured: Sequence[MeasuredPoint[Point]], prior: CostProfile
) -> tuple[Fit, Sequence[str]]:
    """Fit the observed packs, or scale the prior if they are too few or too similar; return warnings."""
    silent = samples.subject.emulate
    fitted, held_out = (
        [point.sample(silent=silent) for point in measured if point.point.held_out is kind] for kind in (False, True)
    )
    try:
        return fit_groups(fitted, prior, held_out=held_out), ()
    except ProfileError as error:
        seen = [*fitted, *held_out]
        if not seen:
            raise ProfileError(
                f"no pack was observed; missing: {_missing(samples)}; the same command with more --budget-minutes "
                "measures them, and 'fcp profile --analytic' computes a profile"
            ) from error
        warning = (
            f"{error}; the model's own figures were scaled to what was observed; missing: {_missing(samples)}; the "
            "same command with more --budget-minutes measures them"
        )
        return _scaled(seen, prior), (warning,)


def _scaled(samples: Sequence[Sample], prior: CostProfile) -> Fit:
    """Return the prior with computation scaled by the median ratio of the samples."""
    seconds = np.array([sample.seconds for sample in samples])
    factor = float(np.median(seconds / predicted_seconds(samples, prior)))
    names = (
        "attention_seconds_per_token2",
        "window_seconds_per_token2",
        "chunk_seconds_per_token",
        "linear_seconds_per_token",
        "microbatch_seconds",
        *("host_microbatch_seconds", "host_hop_seconds", "host_last_hop_seconds", "host_halo_message_seconds"),
        "ring_hop_seconds",
        "last_hop_seconds",
        "halo_message_seconds",
    )
    scaled = {name: factor * getattr(prior.coefficients, name) for name in names}
    profile = replace(prior, coefficients=replace(prior.coefficients, **scaled))
    return Fit(
        profile=profile,
        relative_errors=predicted_seconds(samples, profile) / seconds - 1.0,
        kept=(f"coefficients: from the model's figures, times {factor:.3g}",),
    )


def _memory_figures(samples: SamplesFile, spec: ModelSpec, recipe: Recipe, sync: Sync) -> MemoryFigures:
    environment = samples.of_kind("environment")[-1]
    subject = samples.subject
    place = place_of(
        subject.cluster,
        ranks=subject.ranks,
        nodes=subject.nodes,
        device_bytes=float(environment.get("device_memory_bytes", 0.0)),
        on_cpu=environment.get("device", "cpu") == "cpu",
    )
    return MemoryFigures(spec=spec, recipe=recipe, sync=sync, place=place, samples=samples)


def _vision_record(samples: SamplesFile, fits: Mapping[str, VisionFit], freeze_vision: bool) -> dict[str, Any]:
    bytes_per_patch = measured_bytes_per_patch(samples)
    return {
        "freeze_vision": freeze_vision,
        "blocks_measured": list(samples.subject.vision_layers) or None,
        **{name: fit.record() for name, fit in fits.items()},
        "bytes_per_patch": bytes_per_patch,
        "memory_readings": compared_peaks("patches", vision_peaks(samples), bytes_per_patch)
        if bytes_per_patch
        else None,
    }


def _missing(samples: SamplesFile) -> str:
    """Name the packs to be fitted that were not observed, cheapest first."""
    seen = {line["point"] for line in samples.of_kind("observation")}
    points = [point for point in samples.subject.points() if not point.held_out and point.key not in seen]
    named = [f"{'+'.join(map(str, point.lengths))} at degree {point.degree}" for point in points[:_NAMED_POINTS]]
    return ", ".join(named) or "none that is fitted"


def _on_one_node(profile: CostProfile) -> CostProfile:
    """Set the inter-node bandwidth to the intra-node one: this machine has no other node."""

    def inside(bandwidth: Bandwidth) -> Bandwidth:
        return replace(bandwidth, inter_node=bandwidth.intra_node)

    ground = profile.common_ground
    ground = ground and replace(ground, bandwidth_bytes_per_second=inside(ground.bandwidth_bytes_per_second))
    return replace(profile, bandwidth=inside(profile.bandwidth), common_ground=ground)


def _prior(samples: SamplesFile, spec: ModelSpec, recipe: Recipe, sync: Sync, *, shares_heads: bool) -> CostProfile:
    """Return the prior for coefficients that packs do not determine: transfers as timed, else the cluster's.

    Ulysses all-to-alls are priced if they were measured or the cluster has message costs.
    """
    prior = replace(_computed(samples, spec, recipe, sync), measurement={})
    if samples.subject.cluster == THIS_MACHINE:  # what a chunk costs its cores is in the hops that were timed
        prior = replace(prior, coefficients=replace(prior.coefficients, chunk_seconds_per_token=0.0))
    intra = _transfer_figures(samples, "intra_node")
    latency, bandwidth = intra or (0.0, 0.0)
    if shares_heads:
        prior = replace(prior, heads=counted_heads(spec, recipe, message_seconds=latency))
    if intra is None:
        return prior
    # A ring is as slow as its slowest hop, and rings over parts of nodes use cross-rail links.
    across = [figures[1] for tier in _ACROSS_NODES if (figures := _transfer_figures(samples, tier)) is not None]
    inter = min(across, default=prior.bandwidth.inter_node)
    again = recipe.recompute == "full"
    c, hop_seconds = prior.coefficients, messages_per_hop(spec, recompute=again) * latency
    coefficients = replace(
        c,
        ring_hop_seconds=hop_seconds,
        halo_message_seconds=messages_per_halo(spec, recompute=again) * latency,
    )
    return replace(
        prior,
        coefficients=coefficients,
        bandwidth=Bandwidth(intra_node=bandwidth, inter_node=inter),
    )


def _with_host(c: Coefficients, samples: SamplesFile, spec: ModelSpec) -> Coefficients:
    """Return the coefficients with the clock of the host as timed; unchanged if the samples hold none."""
    points, layers = samples.subject.points(), samples.subject.layers
    timed = measured_points(samples, points, layers=layers, model_layers=spec.num_layers, kind="host")
    of_degree = {one.point.degree: one.seconds for one in timed}
    if 1 not in of_degree:
        return c
    alone = of_degree.pop(1)
    hops = [max(0.0, seconds - alone) / (degree - 1) for degree, seconds in of_degree.items()]
    # What a ring issues once is part of its hops, as timed.
    host = {"host_hop_seconds": float(np.median(hops)), "host_last_hop_seconds": 0.0} if hops else {}
    return replace(c, host_microbatch_seconds=alone, **host)


def _computed(samples: SamplesFile, spec: ModelSpec, recipe: Recipe, sync: Sync) -> CostProfile:
    cluster = load_cluster(samples.subject.cluster)
    return analytic_profile(spec, cluster, recipe=recipe, sync=sync, ranks=samples.subject.ranks)


def _transfer_figures(samples: SamplesFile, tier: str) -> tuple[float, float] | None:
    """Fit (seconds per message, bytes per second) by non-negative least squares on relative error."""
    by_size: dict[int, list[float]] = {}
    for line in samples.of_kind("transfer"):
        if line["tier"] == tier:
            by_size.setdefault(int(line["bytes"]), []).extend(line["seconds"])
    if len(by_size) < 2:
        return None
    seconds = np.array([max(samples.summary(values), 1e-9) for values in by_size.values()])
    columns = np.stack([np.ones(len(seconds)), np.array(list(by_size), dtype=np.float64)], axis=1) / seconds[:, None]
    latency, per_byte = non_negative_least_squares(columns, np.ones(len(seconds)))
    return float(latency), float(1.0 / max(per_byte, 1e-15))


def _assumed(samples: SamplesFile, spec: ModelSpec, encoder: VisionFit | None) -> list[str]:
    assumed = ["coefficients.ring_bytes_per_token: counted from the model's figures"]
    if spec.vision is not None and encoder is None:
        assumed.append("coefficients.vision_*: from the model's figures; too few calls of the encoder were observed")
    if spec.vision is not None and not samples.of_kind("vision_memory"):
        assumed.append("memory of the vision encoder: from the model's figures")
    if text_bytes_per_token(samples, spec) is None:
        assumed.append("memory.bytes_per_token: from the model's figures")
    assumed.append("memory.model_state_bytes: from the model's figures and the recipe")
    if load_cluster(samples.subject.cluster).links_per_node is not None:
        assumed.append("step, coefficients.chunk_seconds_per_token: from the figures of the model and the cluster")
    return assumed


def _circumstances(samples: SamplesFile, environment: Mapping[str, Any]) -> dict[str, Any]:
    subject, steps = samples.subject, samples.of_kind("step")
    transfers = {
        tier: {"seconds_per_message": figures[0], "bytes_per_second": figures[1]}
        for tier in ("intra_node", *_ACROSS_NODES)
        if (figures := _transfer_figures(samples, tier)) is not None
    }
    described = {key: value for key, value in environment.items() if key not in ("kind", "at") and value is not None}
    return {
        "date": environment.get("at"),
        "fcp": __version__,
        **described,
        **_clocks(samples),
        "layers_measured": list(subject.layers),
        "degrees": list(subject.degrees),
        "emulated": "degrees above 1: one rank, silent peers, no communication" if subject.emulate else "none",
        "compute_only_degrees": [degree for degree in subject.degrees if degree > 1] if subject.emulate else None,
        "transfers": transfers,
        "first_contact": _first_contacts(samples) or None,
        "left_out": [key for line in samples.of_kind("left_out")[-1:] for key in line["points"]] or None,
        "step_seconds": samples.summary(steps[-1]["seconds"]) if steps else None,
        "step_share_of_optimizer": steps[-1].get("optimizer_share") if steps else None,
    }


def _clocks(samples: SamplesFile) -> dict[str, Any]:
    """Return the clocks of all ranks in MHz before the first and after the last observation; {} on a CPU."""
    return {f"clocks_{line['when']}_mhz": line["sm_mhz"] for line in samples.of_kind("clocks")}


def _first_contacts(samples: SamplesFile) -> dict[str, Any]:
    """Return the extra time of the first message between two ranks, by tier."""
    return {
        line["tier"]: {
            "milliseconds": 1e3 * float(np.median(line["seconds"])),
            "device_megabytes": None if line.get("bytes") is None else float(np.median(line["bytes"])) / 1e6,
        }
        for line in samples.of_kind("first_contact")
    }


def _errors(measured: Sequence[MeasuredPoint[Point]], predicted: Any) -> dict[str, Any]:
    relative = np.array(predicted) / np.array([point.seconds for point in measured]) - 1.0
    held_out = np.array([point.point.held_out for point in measured])
    return {
        "fitted_error_percent": mean_absolute_percentage(relative[~held_out]),
        "held_out_error_percent": mean_absolute_percentage(relative[held_out]) if held_out.any() else None,
        "error_by_degree": _errors_by_group(measured, predicted),
    }


def _errors_by_group(measured: Sequence[MeasuredPoint[Point]], predicted: Any) -> list[dict[str, Any]]:
    """Return mean absolute errors in percent, by degree and Ulysses degree.

    Held-out errors are None if nothing was held out.
    """
    found = []
    for degree, shared in sorted({(point.point.degree, point.point.heads_degree) for point in measured}):
        errors: dict[bool, list[float]] = {False: [], True: []}
        for point, seconds in zip(measured, predicted, strict=True):
            if (point.point.degree, point.point.heads_degree) == (degree, shared):
                errors[point.point.held_out].append(float(seconds) / point.seconds - 1.0)
        found.append(
            {
                "degree": degree,
                "heads_degree": shared,
                "points": len(errors[False]),
                "fitted_percent": mean_absolute_percentage(errors[False]) if errors[False] else 0.0,
                "held_out_points": len(errors[True]),
                "held_out_percent": mean_absolute_percentage(errors[True]) if errors[True] else None,
            }
        )
    return found


def _described(point: Point) -> dict[str, Any]:
    heads = {"heads_degree": point.heads_degree} if point.heads_degree > 1 else {}
    return {"lengths": list(point.lengths), "degree": point.degree, **heads}


def _rounded(value: Any) -> Any:
    """Round measured values to six significant digits, and drop None."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


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
    """Memory of a measured profile.

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
        """Return the estimated extra bytes per token of a ring member, mostly ring buffers."""
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
            command = shlex.join(["fcp", "profile", "--from-samples", str(self.samples.path), *other.recipe.flags()])
            return [f"{does_not}; {other.recipe.describe()} leaves {other.tokens:,} tokens per rank: {command}"]
        thriftiest = fitting_recipe(self.spec, RecipeRequest.to_train_as(self.recipe), self.place)
        if thriftiest.tokens >= 1:
            command = shlex.join(["fcp", "profile", *thriftiest.recipe.flags()])
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


def measured_recipe(spec: ModelSpec, recipe: Recipe) -> Recipe:
    """Return the recipe under which packs are measured: the full language model is trained.

    A vision encoder without trained weights is timed frozen.
    """
    is_frozen = spec.vision is not None and not backward_of(spec, recipe).vision.inputs
    return replace(recipe, lora=None, freeze=None, freeze_vision=is_frozen)


def scaled_to_trained(profile: CostProfile, whole: CostProfile, tuned: CostProfile) -> tuple[CostProfile, str | None]:
    """Return the profile scaled to the trained part, and the assumption made, or None.

    Args:
        profile: fitted profile.
        whole: computed profile of the measured recipe.
        tuned: computed profile of the wanted recipe.
    """
    ratios = {
        f.name: getattr(tuned.coefficients, f.name) / before
        for f in fields(Coefficients)
        if (before := getattr(whole.coefficients, f.name))
    }
    changed = {name: ratio for name, ratio in ratios.items() if ratio != 1.0}
    if not changed:
        return profile, None
    words = ", ".join(f"{name} x {ratio:.3g}" for name, ratio in changed.items())
    return (
        profile.with_coefficients(
            lambda c: replace(c, **{name: ratio * getattr(c, name) for name, ratio in changed.items()})
        ),
        f"coefficients: measured with the full language model trained, then scaled to the trained part: {words}",
    )


def heads_of_trained(heads: Heads, whole: Heads, tuned: Heads) -> Heads:
    """Return the all-to-all costs scaled to the trained part by counted bytes and messages."""
    names = ("exchange_bytes_per_token", "key_value_exchange_bytes_per_token", "exchange_seconds")
    counted = {name: getattr(tuned, name) / getattr(whole, name) for name in names}
    return replace(heads, **{name: ratio * getattr(heads, name) for name, ratio in counted.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFit:
    """Fit of trained (forward and backward) or frozen (forward only) calls.

    Attributes:
        costs: fitted coefficients.
        points: observed calls, fitted and held out.
        predicted_seconds: predicted seconds of each call.
    """

    costs: VisionCosts
    points: tuple[MeasuredPoint[VisionPoint], ...]
    predicted_seconds: tuple[float, ...]

    def error_percent(self, *, held_out: bool) -> float | None:
        """Return the mean absolute error in percent, or None without such points."""
        errors = [
            predicted / measured.seconds - 1.0
            for measured, predicted in zip(self.points, self.predicted_seconds, strict=True)
            if measured.point.held_out is held_out
        ]
        return mean_absolute_percentage(errors) if errors else None

    def record(self) -> dict[str, Any]:
        """Return the record for the measurement block."""
        return {
            "call_seconds": self.costs.call_seconds,
            "seconds_per_patch": self.costs.seconds_per_patch,
            "seconds_per_patch2": self.costs.seconds_per_patch2,
            "fitted_points": sum(not measured.point.held_out for measured in self.points),
            "fitted_error_percent": self.error_percent(held_out=False),
            "held_out_points": sum(measured.point.held_out for measured in self.points),
            "held_out_error_percent": self.error_percent(held_out=True),
            "points": [
                {"part_sides_patches": list(measured.point.sides), **measured.record(predicted)}
                for measured, predicted in zip(self.points, self.predicted_seconds, strict=True)
            ],
        }


def fit_vision_samples(samples: SamplesFile, spec: ModelSpec) -> Mapping[str, VisionFit]:
    """Fit `trained` and `frozen` calls, each if enough were observed; {} without an encoder."""
    if spec.vision is None:
        return {}
    found: dict[str, VisionFit] = {}
    for name, trained in (("trained", True), ("frozen", False)):
        measured = measured_points(
            samples,
            [point for point in samples.subject.vision_points() if point.trained is trained],
            layers=samples.subject.vision_layers,
            model_layers=spec.vision.depth,
        )
        fitted = [one for one in measured if not one.point.held_out]
        if len(fitted) >= LEAST_SAMPLES:
            costs = fit_vision([one.point.part_patches for one in fitted], np.array([one.seconds for one in fitted]))
            predicted = costs.predicted_seconds([one.point.part_patches for one in measured])
            found[name] = VisionFit(costs=costs, points=tuple(measured), predicted_seconds=tuple(predicted.tolist()))
    return found


def with_vision(profile: CostProfile, costs: VisionCosts) -> CostProfile:
    """Return the profile with these encoder costs; each micro-batch makes one call with its fixed cost."""

    def changed(coefficients: Coefficients) -> Coefficients:
        clock = "host_microbatch_seconds" if coefficients.host_microbatch_seconds else "microbatch_seconds"
        return replace(
            coefficients,
            **{clock: getattr(coefficients, clock) + costs.call_seconds},
            vision_seconds_per_patch=costs.seconds_per_patch,
            vision_seconds_per_patch2=costs.seconds_per_patch2,
        )

    return profile.with_coefficients(changed)


def measured_bytes_per_patch(samples: SamplesFile) -> float | None:
    """Return a trained encoder's bytes per patch from peaks of growing calls, or None."""
    return slope_of_peaks(vision_peaks(samples))


def vision_peaks(samples: SamplesFile) -> list[tuple[float, float]]:
    """Return (patches, peak bytes) of growing encoder calls."""
    return [(line["patches"], line["peak_bytes"]) for line in samples.of_kind("vision_memory")]


def slope_of_peaks(readings: Sequence[tuple[float, float]]) -> float | None:
    """Fit bytes per unit to (units, peak bytes); None if there are fewer than two or peaks do not grow."""
    peaks = sorted(readings)
    if len(peaks) < 2 or peaks[-1][1] <= peaks[0][1]:
        return None
    units, peak_bytes = np.array(peaks, dtype=np.float64).T
    return float(np.polyfit(units, peak_bytes, 1)[0])


def compared_peaks(unit: str, peaks: Sequence[tuple[float, float]], slope: float | None) -> list[dict[str, Any]]:
    """Compare (units, peak bytes) with the fitted slope, for the measurement block."""
    return [
        {
            unit: units,
            "peak_bytes": peak_bytes,
            "error_percent": slope and 100.0 * (slope * units / max(peak_bytes, 1.0) - 1.0),
        }
        for units, peak_bytes in peaks
    ]
