"""Fits a cost profile to samples; its measurement block records what was measured, on what, and how far off it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from fcp_cli import __version__
from fcp_cli.cost.fitting import LEAST_SAMPLES, fit_profile, mean_absolute_percentage, predicted_seconds
from fcp_cli.cost.profile import Bandwidth, CostProfile, Memory, dump_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.memory import (
    PRECISIONS,
    RESERVE_FRACTION,
    Parallelism,
    Precision,
    model_state,
    precision_name,
    vision_bytes_per_token,
)
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.profiling.analytic import analytic_profile, messages_per_hop
from fcp_cli.profiling.points import Point
from fcp_cli.profiling.samples import MeasuredPoint, SamplesFile, measured_points
from fcp_cli.profiling.vision_fit import (
    VisionFit,
    fit_vision_samples,
    measured_bytes_per_patch,
    memory_readings,
    slope_of_peaks,
    with_vision,
)

_DIGITS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class DegreeError:
    """Mean absolute error of the prediction at one degree, in per cent; None where nothing was held out."""

    degree: int
    points: int
    fitted_percent: float
    held_out_points: int
    held_out_percent: float | None


def profile_from_samples(samples: SamplesFile, *, freeze_vision: bool = False) -> CostProfile:
    """Fit a cost profile; its measurement block holds hardware, versions, points and errors.

    Args:
        samples: of one measurement, which times a vision encoder both trained and frozen.
        freeze_vision: the profile is for a job that does not train the encoder.

    Raises:
        UsageError: `freeze_vision`, but the model has no encoder.
        ProfileError: too few points were observed, or the worker wrote none about its environment.
    """
    subject = samples.subject
    spec = load_model(subject.model)
    environments = samples.of_kind("environment")
    if not environments:
        raise ProfileError("the samples hold no measurement yet: the worker never began; run 'fcp profile' again")
    measured = measured_points(samples, subject.points(), layers=subject.layers, model_layers=spec.num_layers)
    if samples.num_fitted < LEAST_SAMPLES:
        raise ProfileError(
            f"only {samples.num_fitted} points were observed, and a fit needs at least {LEAST_SAMPLES}; missing: "
            f"{_missing(samples)}; the same command with more --budget-minutes measures them"
        )
    fitted, held_out = (
        [point.sample(silent=subject.emulate) for point in measured if point.point.held_out is kind]
        for kind in (False, True)
    )
    prior = _prior(samples, spec, freeze_vision)
    fit = fit_profile(fitted, prior, held_out=held_out)
    predicted = predicted_seconds([point.sample(silent=subject.emulate) for point in measured], fit.profile)
    vision = fit_vision_samples(samples, spec)
    encoder = vision.get("frozen" if freeze_vision else "trained")
    memory = _memory(samples, spec, environments[-1], prior, freeze_vision)
    profile = replace(fit.profile, origin="measured", memory=memory)
    if subject.nodes == 1 and subject.cluster == "this-machine":
        profile = _on_one_node(profile)
    if encoder is not None:
        profile = with_vision(profile, encoder.costs)
    measurement = {
        **_circumstances(samples, environments[-1]),
        **_errors(measured, predicted),
        "held_out_error_percent_by_model": fit.held_out_percent,
        "assumed": [*fit.kept, *_assumed(samples, spec, encoder)],
        "memory_readings": _memory_readings(samples),
        "vision_encoder": _vision_record(samples, vision, freeze_vision) if spec.vision is not None else None,
        "points": [_point_record(point, float(seconds)) for point, seconds in zip(measured, predicted, strict=True)],
    }
    profile = replace(profile, measurement=_rounded(measurement))
    return replace(profile, text=dump_cost_profile(profile))


def _vision_record(samples: SamplesFile, fits: Mapping[str, VisionFit], freeze_vision: bool) -> dict[str, Any]:
    bytes_per_patch = measured_bytes_per_patch(samples)
    return {
        "freeze_vision": freeze_vision,
        "blocks_measured": list(samples.subject.vision_layers) or None,
        **{name: fit.record() for name, fit in fits.items()},
        "bytes_per_patch": bytes_per_patch,
        "memory_readings": memory_readings(samples, bytes_per_patch) if bytes_per_patch else None,
    }


def _missing(samples: SamplesFile) -> str:
    """Name the packs that were to be fitted and were not observed, cheapest first, as many as a fit needs."""
    seen = {line["point"] for line in samples.of_kind("observation")}
    points = [point for point in samples.subject.points() if not point.held_out and point.key not in seen]
    named = [f"{'+'.join(map(str, point.lengths))} at degree {point.degree}" for point in points[:LEAST_SAMPLES]]
    return ", ".join(named)


def _on_one_node(profile: CostProfile) -> CostProfile:
    """Give rings across nodes the bandwidth inside: this machine has no other node."""
    ground = profile.common_ground
    if ground is not None:
        ground = replace(ground, bandwidth=replace(ground.bandwidth, inter_node=ground.bandwidth.intra_node))
    bandwidth = replace(profile.bandwidth, inter_node=profile.bandwidth.intra_node)
    return replace(profile, bandwidth=bandwidth, common_ground=ground)


def _prior(samples: SamplesFile, spec: ModelSpec, freeze_vision: bool) -> CostProfile:
    """Return figures for what packs do not show: transfers between ranks where they were timed, else the cluster's."""
    prior = analytic_profile(
        spec,
        load_cluster(samples.subject.cluster),
        precision=_precision(samples),
        parallelism=_parallelism(samples, freeze_vision),
    )
    tiers = {tier: _transfer_figures(samples, tier) for tier in ("intra_node", "inter_node")}
    latency, bandwidth = tiers["intra_node"] or (0.0, 0.0)
    if not bandwidth:
        return prior
    inter = tiers["inter_node"][1] if tiers["inter_node"] else prior.bandwidth.inter_node
    coefficients = replace(prior.coefficients, ring_hop_seconds=messages_per_hop(spec) * latency)
    return replace(
        prior, coefficients=coefficients, bandwidth=Bandwidth(intra_node=bandwidth, inter_node=inter), measurement={}
    )


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
    # Columns of equal norm: one counts messages, the other bytes, and the solver would lose the smaller one.
    norms = np.linalg.norm(columns, axis=0)
    latency, per_byte = nnls(columns / norms, np.ones(len(seconds)))[0] / norms
    return float(latency), float(1.0 / max(per_byte, 1e-15))


def _precision(samples: SamplesFile) -> Precision:
    return PRECISIONS[precision_name(samples.subject.dtype)]


def _parallelism(samples: SamplesFile, freeze_vision: bool) -> Parallelism:
    return Parallelism(ranks=samples.subject.ranks, zero_stage=0, freeze_vision=freeze_vision)


def _memory(
    samples: SamplesFile, spec: ModelSpec, environment: Mapping[str, Any], prior: CostProfile, freeze_vision: bool
) -> Memory:
    """Return the memory block: measured where the whole model ran, else from its figures.

    A visual token's bytes include those of its patches, unless the encoder is frozen.
    """
    slope, steps = _bytes_per_token(samples), samples.of_kind("step")
    capacity = float(environment["device_memory_bytes"]) * (1 - RESERVE_FRACTION)
    if slope is None or not steps:
        return replace(prior.memory, capacity_bytes=capacity)
    state = float(steps[-1]["state_bytes"])
    if spec.vision is not None:
        precision, parallelism = _precision(samples), _parallelism(samples, freeze_vision)
        per_patch = measured_bytes_per_patch(samples)
        if per_patch is None or freeze_vision:
            slope += vision_bytes_per_token(spec, precision, parallelism)
        else:
            slope += spec.vision.merge_size**2 * per_patch
        # The worker's optimizer held the language model alone; the tower's state is added from its figures.
        whole, text = (
            model_state(one, precision, parallelism).total_bytes for one in (spec, replace(spec, vision=None))
        )
        state += whole - text
    return Memory(bytes_per_token=slope, model_state_bytes=state, capacity_bytes=capacity)


def _bytes_per_token(samples: SamplesFile) -> float | None:
    """Return the language model's bytes per token, from peaks of growing packs; None where they do not show it."""
    return slope_of_peaks([(line["tokens"], line["peak_bytes"]) for line in samples.of_kind("memory")])


def _memory_readings(samples: SamplesFile) -> list[dict[str, Any]]:
    """Compare peak bytes of the language model's activations on one rank with the line fitted to them."""
    slope = _bytes_per_token(samples)
    return [
        {
            "tokens": line["tokens"],
            "peak_bytes": line["peak_bytes"],
            "error_percent": slope and 100.0 * (slope * line["tokens"] / max(line["peak_bytes"], 1.0) - 1.0),
        }
        for line in samples.of_kind("memory")
    ]


def _assumed(samples: SamplesFile, spec: ModelSpec, encoder: VisionFit | None) -> list[str]:
    assumed = ["coefficients.ring_bytes_per_token: counted from the model's figures"]
    if spec.vision is not None and encoder is None:
        assumed.append("coefficients.vision_*: from the model's figures; too few calls of the encoder were observed")
    if spec.vision is not None and not samples.of_kind("vision_memory"):
        assumed.append("memory of the vision encoder: from the model's figures")
    if len(samples.of_kind("memory")) < 2:
        assumed.append("memory.bytes_per_token, memory.model_state_bytes: from the model's figures")
    return assumed


def _circumstances(samples: SamplesFile, environment: Mapping[str, Any]) -> dict[str, Any]:
    subject, steps = samples.subject, samples.of_kind("step")
    transfers = {
        tier: {"seconds_per_message": figures[0], "bytes_per_second": figures[1]}
        for tier in ("intra_node", "inter_node")
        if (figures := _transfer_figures(samples, tier)) is not None
    }
    described = {key: value for key, value in environment.items() if key not in ("kind", "at") and value is not None}
    return {
        "date": environment["at"],
        "fcp": __version__,
        **described,
        "layers_measured": list(subject.layers),
        "degrees": list(subject.degrees),
        "emulated": "degrees above 1: one rank, silent peers, no communication" if subject.emulate else "none",
        "transfers": transfers,
        "left_out": [key for line in samples.of_kind("left_out")[-1:] for key in line["points"]] or None,
        "step_seconds": samples.summary(steps[-1]["seconds"]) if steps else None,
    }


def _errors(measured: Sequence[MeasuredPoint[Point]], predicted: Any) -> dict[str, Any]:
    degrees = errors_by_degree(measured, predicted)
    relative = np.array(predicted) / np.array([point.seconds for point in measured]) - 1.0
    held_out = np.array([point.point.held_out for point in measured])
    return {
        "fitted_error_percent": mean_absolute_percentage(relative[~held_out]),
        "held_out_error_percent": mean_absolute_percentage(relative[held_out]) if held_out.any() else None,
        "error_by_degree": [asdict(degree) for degree in degrees],
    }


def errors_by_degree(measured: Sequence[MeasuredPoint[Point]], predicted: Any) -> list[DegreeError]:
    """Return the mean errors of fitted and of held-out points at each degree."""
    found = []
    for degree in sorted({point.point.degree for point in measured}):
        errors: dict[bool, list[float]] = {False: [], True: []}
        for point, seconds in zip(measured, predicted, strict=True):
            if point.point.degree == degree:
                errors[point.point.held_out].append(float(seconds) / point.seconds - 1.0)
        found.append(
            DegreeError(
                degree=degree,
                points=len(errors[False]),
                fitted_percent=mean_absolute_percentage(errors[False]) if errors[False] else 0.0,
                held_out_points=len(errors[True]),
                held_out_percent=mean_absolute_percentage(errors[True]) if errors[True] else None,
            )
        )
    return found


def _point_record(point: MeasuredPoint[Point], predicted: float) -> dict[str, Any]:
    return {
        "lengths": list(point.point.lengths),
        "degree": point.point.degree,
        "seconds": point.seconds,
        "predicted_seconds": predicted,
        "error_percent": 100.0 * (predicted / point.seconds - 1.0),
        "held_out": point.point.held_out,
        "repeats": point.repeats,
    }


def _rounded(value: Any) -> Any:
    """Round measured figures to six significant digits, and leave out what is unknown."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
