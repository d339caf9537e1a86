"""A samples file as 8 H100 would leave it: times of the analytic model with the noise of such devices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fcp_cli.cost.fitting import Sample, predicted_seconds
from fcp_cli.cost.profile import CostProfile, Sync
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.activations import kept_bytes, mlp_backward_bytes, recomputed_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.profiling.samples import Measurement, append_line, begin_samples

MODEL, CLUSTER, RANKS = "qwen3-8b", "h100-8x8", 8
LAYERS = (2, 6)
DEVICE_BYTES = 85e9  # as the driver of an H100 of 80 GB tells it
_HEAD_SHARE = 0.08  # of a micro-batch's time that does not grow with the layers
_NOISE = 0.012
_RUNS = 5


def truth(recipe: Recipe) -> CostProfile:
    """What the times were drawn around."""
    sync: Sync = "microbatch" if recipe.zero_stage == 3 else "iteration"
    return analytic_profile(load_model(MODEL), load_cluster(CLUSTER), recipe=recipe, sync=sync, ranks=RANKS)


def write_samples(path: Path, recipe: Recipe, *, finished: bool = True) -> None:
    """Write what the worker of `fcp profile --model qwen3-8b` would on 8 H100s of one node."""
    measurement = Measurement(
        model=MODEL,
        cluster=CLUSTER,
        ranks=RANKS,
        degrees=(1, 2, 3, 4, 6, 8),
        max_length=131_072,
        device="cuda",
        recipe=recipe,
        sync="microbatch" if recipe.zero_stage == 3 else "iteration",
        layers=LAYERS,
        budget_seconds=600.0,
        samples=path,
    )
    begin_samples(measurement)
    draw = random.Random(0)
    for line in (*_circumstances(draw), *_observations(measurement, draw), *_memory(recipe)):
        append_line(path, line)
    append_line(path, {"kind": "step", "layers": 6, "seconds": [0.11, 0.1, 0.1], "state_bytes": 4e9})
    if finished:
        append_line(path, {"kind": "finished", "at": "later"})


def _circumstances(draw: random.Random) -> Iterator[dict[str, Any]]:
    yield {
        "kind": "environment",
        "at": "2026-11-22T08:00:00+00:00",
        "device": "cuda",
        "device_name": "NVIDIA H100 80GB HBM3",
        "ranks": RANKS,
        "ranks_per_node": RANKS,
        "device_memory_bytes": DEVICE_BYTES,
        "clocks": "SM now, SM most, memory, power limit: 345 MHz, 1980 MHz, 2619 MHz, 700.00 W",
        "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }
    seconds = [0.3 + 0.2 * draw.random() for _ in range(RANKS)]
    yield {"kind": "first_contact", "tier": "intra_node", "seconds": seconds, "bytes": [0.47e9] * RANKS}
    rate = load_cluster(CLUSTER).intra_node_bytes_per_second
    for exponent in (12, 16, 20, 24, 27):
        size = 1 << exponent
        seconds = [(3e-5 + size / rate) * draw.lognormvariate(0, _NOISE) for _ in range(12)]
        yield {"kind": "transfer", "tier": "intra_node", "bytes": size, "seconds": seconds}
    yield {"kind": "clocks", "when": "before", "sm_mhz": [1980.0] * RANKS}
    yield {"kind": "clocks", "when": "after", "sm_mhz": [1755.0 + 15 * rank for rank in range(RANKS)]}


def _observations(measurement: Measurement, draw: random.Random) -> Iterator[dict[str, Any]]:
    points = measurement.points()
    samples = [
        Sample(lengths=point.lengths, degree=point.degree, heads_degree=point.heads_degree, seconds=1.0)
        for point in points
    ]
    layers = load_model(MODEL).num_layers
    for point, seconds in zip(points, predicted_seconds(samples, truth(measurement.recipe)).tolist(), strict=True):
        if seconds > 30.0:  # a third of what is left of ten minutes does not pay for it
            continue
        groups = RANKS // point.degree
        for count in LAYERS:
            expected = seconds * (_HEAD_SHARE + (1 - _HEAD_SHARE) * count / layers)
            # The first runs go at boost clocks; one run in forty waits for something else.
            boost = [0.97, 0.99, 1.0, 1.0, 1.0]
            late = [1.0 if draw.random() < 0.975 else 1.3 for _ in range(groups * _RUNS)]
            yield {
                "kind": "observation",
                "point": point.key,
                "layers": count,
                "seconds": [
                    expected * boost[run % _RUNS] * late[run] * draw.lognormvariate(0, _NOISE)
                    for run in range(groups * _RUNS)
                ],
            }


def _memory(recipe: Recipe) -> Iterator[dict[str, Any]]:
    spec, precision = load_model(MODEL), precision_of(recipe)
    (kind,) = spec.kinds
    once = recomputed_bytes(spec, kind, recipe, precision) + mlp_backward_bytes(spec, kind, precision)
    for layers in LAYERS:
        for tokens in (4096, 8192, 16_384):
            per_token = layers * kept_bytes(spec, kind, recipe, precision) + once
            yield {"kind": "memory", "tokens": tokens, "layers": layers, "peak_bytes": 3e8 + per_token * tokens}
