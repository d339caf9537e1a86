"""Fits vision encoder coefficients, trained and frozen, to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fcp_cli.cost.fitting import LEAST_SAMPLES
from fcp_cli.cost.least_squares import mean_absolute_percentage
from fcp_cli.cost.profile import Coefficients, CostProfile
from fcp_cli.cost.vision_fitting import VisionCosts, fit_vision
from fcp_cli.models.model import ModelSpec
from fcp_cli.profiling.fits.points import VisionPoint
from fcp_cli.profiling.fits.samples import MeasuredPoint, SamplesFile, measured_points


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
        return replace(
            coefficients,
            microbatch_seconds=coefficients.microbatch_seconds + costs.call_seconds,
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
