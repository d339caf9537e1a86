"""Fits a cost profile to samples; its measurement block records samples, machine and fit errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fcp_cli import __version__
from fcp_cli.cost.attention_kernels import KernelTable
from fcp_cli.cost.fitting import Fit, Sample, predicted_seconds
from fcp_cli.cost.heads_fitting import fit_groups
from fcp_cli.cost.least_squares import mean_absolute_percentage, non_negative_least_squares
from fcp_cli.cost.profile import Bandwidth, CostProfile, Sync, dump_cost_profile
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.models.cluster import THIS_MACHINE, load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.computed.analytic import analytic_profile, counted_heads, messages_per_halo, messages_per_hop
from fcp_cli.profiling.fits.measurement import timed_settings
from fcp_cli.profiling.fits.memory_block import MemoryFigures, place_of, readings, text_bytes_per_token
from fcp_cli.profiling.fits.points import Point
from fcp_cli.profiling.fits.samples import MeasuredPoint, SamplesFile, kernel_table, measured_points
from fcp_cli.profiling.fits.tuned import heads_of_trained, measured_recipe, scaled_to_trained
from fcp_cli.profiling.fits.vision_fit import (
    VisionFit,
    compared_peaks,
    fit_vision_samples,
    measured_bytes_per_patch,
    vision_peaks,
    with_vision,
)
from fcp_cli.recipe import Recipe, RecipeRequest, check_recipe

_DIGITS = 6
_NAMED_POINTS = 5


_ACROSS_NODES = ("inter_node", "inter_node_cross_rail")


def recipe_of(samples: SamplesFile, request: RecipeRequest, sync: Sync | None) -> tuple[Recipe, Sync]:
    """Return recipe and sync of a profile: as measured, overridden by the request."""
    measured = samples.subject
    recipe = request.applied_to(measured.recipe)
    was, asked = timed_settings(measured.recipe), timed_settings(recipe)
    for name in was:
        if was[name] != asked[name]:
            raise UsageError(
                f"--{name} {asked[name]}: the samples were measured with --{name} {was[name]}, and times differ; "
                f"measure with 'fcp profile --{name} {asked[name]} --fresh'"
            )
    if sync is None:
        sync = "microbatch" if recipe.zero_stage == 3 else measured.sync
    check_recipe(recipe, sync=sync)
    return recipe, sync


def profile_from_samples(
    samples: SamplesFile, *, request: RecipeRequest | None = None, sync: Sync | None = None
) -> CostProfile:
    """Fit a cost profile; its measurement block records hardware, versions, points, errors and warnings.

    Any observations yield a profile. If packs are too few or too similar to fit, the analytic coefficients are scaled
    to them. If the recipe leaves no memory for tokens, a warning names one that does.

    Args:
        samples: samples of a measurement; a vision encoder is timed both trained and frozen.
        request: recipe settings that override the measured ones; settings that affect times cannot change.
        sync: sync of the plans; None: as measured.
    """
    subject = samples.subject
    spec = load_model(subject.model)
    environments = samples.of_kind("environment")
    if not environments:
        raise ProfileError("the samples hold no measurement yet: the worker never began; run 'fcp profile' again")
    recipe, sync = recipe_of(samples, request or RecipeRequest(), sync)
    measured = measured_points(samples, subject.points(), layers=subject.layers, model_layers=spec.num_layers)
    timed = measured_recipe(spec, recipe)
    prior = _prior(samples, spec, timed, sync, shares_heads=any(one.point.heads_degree > 1 for one in measured))
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
    table = kernel_table(samples)
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
    last_hop_seconds = c.last_hop_seconds * hop_seconds / c.ring_hop_seconds if c.ring_hop_seconds else 0.0
    coefficients = replace(
        c,
        ring_hop_seconds=hop_seconds,
        last_hop_seconds=last_hop_seconds,
        halo_message_seconds=messages_per_halo(spec, recompute=again) * latency,
    )
    return replace(
        prior,
        coefficients=coefficients,
        bandwidth=Bandwidth(intra_node=bandwidth, inter_node=inter),
    )


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
