"""Compares predicted with measured times of held-out packs, and a token's memory with its estimate."""

from __future__ import annotations

from typing import Any

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.profiling.fits.assemble import profile_from_samples
from fcp_cli.profiling.fits.measurement import Measurement, read_measurement
from fcp_cli.profiling.fits.memory_block import text_bytes_per_token
from fcp_cli.profiling.fits.samples import SamplesFile, read_samples
from fcp_cli.profiling.workers.worker import Measurer
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.findings import Finding

_PACKS = 5
# Checked only on accelerators: on a CPU, times and resident sizes depend on other load.
_MOST_ERROR_PERCENT = 15.0
_MOST_MEMORY_ERROR_PERCENT = 10.0


def check(bench: Bench) -> Finding:
    """Measure packs for the requested time, like `fcp profile`, and compare the held-out ones."""
    bench.begin("packs: forward and backward of a model")
    request = read_measurement(bench.settings.measurement)
    Measurer(request, bench.device).run()
    if not bench.is_first:
        return Finding(name="packs", passed=None, lines=())
    samples = read_samples(request.samples)
    try:
        profile = profile_from_samples(samples)
    except ProfileError as error:
        return Finding(name="packs", passed=False, lines=(str(error),))
    judged = bench.device.type != "cpu"
    return _finding(request, profile, memory_error_percent(samples, request), judged=judged)


def _finding(request: Measurement, profile: CostProfile, memory_percent: float | None, *, judged: bool) -> Finding:
    points = held_out(profile)
    errors = [abs(point["error_percent"]) for point in points]
    mean = sum(errors) / len(errors) if errors else None
    lines = [
        f"{request.model}, {request.recipe.describe()}: predicted against measured on {len(points)} held-out packs, "
        f"mean error {'-' if mean is None else f'{mean:.1f} %'}"
    ]
    lines += [
        f"degree {point['degree']}, {sum(point['lengths']):,} tokens in {len(point['lengths'])}: "
        f"{1e3 * point['predicted_seconds']:.3g} ms, measured {1e3 * point['seconds']:.3g} ms"
        for point in points
    ]
    if memory_percent is not None:
        quantity = "bytes allocated" if judged else "resident size, which is coarse,"
        lines.append(f"memory of a token: {quantity} {memory_percent:+.1f} % against the estimate")
    passed = None
    if judged and mean is not None:
        passed = mean <= _MOST_ERROR_PERCENT and abs(memory_percent or 0.0) <= _MOST_MEMORY_ERROR_PERCENT
    figures = {"packs": points, "mean_error_percent": mean, "memory_error_percent": memory_percent}
    return Finding(name="packs", passed=passed, lines=tuple(lines), figures=figures)


def held_out(profile: CostProfile) -> list[dict[str, Any]]:
    """Return up to five held-out packs, from cheapest to most expensive."""
    points = [point for point in profile.measurement["points"] if point["held_out"]]
    points.sort(key=lambda point: float(point["seconds"]))
    if len(points) <= _PACKS:
        return points
    return [points[number * (len(points) - 1) // (_PACKS - 1)] for number in range(_PACKS)]


def memory_error_percent(samples: SamplesFile, request: Measurement) -> float | None:
    """Return by how many percent a token's measured memory on a single rank exceeds the estimate, or None."""
    spec = load_model(request.model)
    measured = text_bytes_per_token(samples, spec)
    if measured is None:
        return None
    alone = rank_memory(spec, request.recipe, sync=request.sync, ranks=1, on_cpu=request.device == "cpu")
    longest = max(int(line["tokens"]) for line in samples.of_kind("memory"))
    # The micro-batch's moment: reduction and update hold no tokens.
    running = max((moment for moment in alone.moments if moment.bytes_per_token), key=lambda one: one.bytes_at(longest))
    return 100.0 * (measured / running.bytes_per_token - 1.0)
