"""From the samples of a vision encoder to its coefficients, trained and frozen, with their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fcp_cli.cost.fitting import LEAST_SAMPLES, mean_absolute_percentage
from fcp_cli.cost.profile import Coefficients, CostProfile
from fcp_cli.cost.vision_fitting import VisionCosts, VisionSample, fit_vision
from fcp_cli.models.model import ModelSpec
from fcp_cli.profiling.measure import vision_points_of
from fcp_cli.profiling.samples import MeasuredPoint, SamplesFile, VisionPoint, measured_points


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFit:
    """One pass, trained or frozen.

    Attributes:
        points: that were observed, fitted and held out.
        predicted_seconds: of each.
    """

    costs: VisionCosts
    points: tuple[MeasuredPoint[VisionPoint], ...]
    predicted_seconds: tuple[float, ...]

    def error_percent(self, *, held_out: bool) -> float | None:
        """Mean absolute error; None where no such point was observed."""
        errors = [
            predicted / measured.seconds - 1.0
            for measured, predicted in zip(self.points, self.predicted_seconds, strict=True)
            if measured.point.held_out is held_out
        ]
        return mean_absolute_percentage(errors) if errors else None

    def record(self) -> dict[str, Any]:
        """For the measurement block of a cost profile."""
        return {
            "call_seconds": self.costs.call_seconds,
            "seconds_per_patch": self.costs.seconds_per_patch,
            "seconds_per_patch2": self.costs.seconds_per_patch2,
            "fitted_points": sum(not measured.point.held_out for measured in self.points),
            "fitted_error_percent": self.error_percent(held_out=False),
            "held_out_points": sum(measured.point.held_out for measured in self.points),
            "held_out_error_percent": self.error_percent(held_out=True),
            "points": [
                {
                    "part_sides_patches": list(measured.point.sides),
                    "seconds": measured.seconds,
                    "predicted_seconds": predicted,
                    "error_percent": 100.0 * (predicted / measured.seconds - 1.0),
                    "held_out": measured.point.held_out,
                    "repeats": measured.repeats,
                }
                for measured, predicted in zip(self.points, self.predicted_seconds, strict=True)
            ],
        }


def fit_vision_samples(samples: SamplesFile, spec: ModelSpec) -> Mapping[str, VisionFit]:
    """By pass, `trained` or `frozen`: those of which enough points were observed; empty without an encoder."""
    if spec.vision is None:
        return {}
    found: dict[str, VisionFit] = {}
    for name, trained in (("trained", True), ("frozen", False)):
        measured = measured_points(
            samples,
            [point for point in vision_points_of(samples.header) if point.trained is trained],
            layers=samples.header.get("vision_layers", ()),
            model_layers=spec.vision.depth,
        )
        fitted = [_sample(one) for one in measured if not one.point.held_out]
        if len(fitted) >= LEAST_SAMPLES:
            costs = fit_vision(fitted)
            predicted = costs.predicted_seconds([_sample(one) for one in measured])
            found[name] = VisionFit(costs=costs, points=tuple(measured), predicted_seconds=tuple(predicted.tolist()))
    return found


def with_vision(profile: CostProfile, costs: VisionCosts) -> CostProfile:
    """The profile with these costs of its encoder; what every call costs is part of every micro-batch."""

    def changed(coefficients: Coefficients) -> Coefficients:
        return replace(
            coefficients,
            microbatch_seconds=coefficients.microbatch_seconds + costs.call_seconds,
            vision_seconds_per_patch=costs.seconds_per_patch,
            vision_seconds_per_patch2=costs.seconds_per_patch2,
        )

    ground = profile.common_ground
    if ground is not None:
        ground = replace(ground, coefficients=changed(ground.coefficients))
    return replace(profile, coefficients=changed(profile.coefficients), common_ground=ground)


def measured_bytes_per_patch(samples: SamplesFile) -> float | None:
    """Of a trained encoder, from peaks of growing calls; None where they were not read, or tell nothing."""
    peaks = sorted((int(line["patches"]), float(line["peak_bytes"])) for line in samples.of_kind("vision_memory"))
    if len(peaks) < 2 or peaks[-1][1] <= peaks[0][1]:
        return None
    patches, peak_bytes = np.array(peaks).T
    return float(np.polyfit(patches, peak_bytes, 1)[0])


def memory_readings(samples: SamplesFile, bytes_per_patch: float) -> Sequence[Mapping[str, Any]]:
    """Peak bytes of calls of the encoder against so many bytes per patch."""
    return [
        {
            "patches": line["patches"],
            "peak_bytes": line["peak_bytes"],
            "error_percent": 100.0 * (bytes_per_patch * line["patches"] / max(line["peak_bytes"], 1.0) - 1.0),
        }
        for line in samples.of_kind("vision_memory")
    ]


def _sample(measured: MeasuredPoint[VisionPoint]) -> VisionSample:
    return VisionSample(part_patches=measured.point.part_patches, seconds=measured.seconds)
