"""From a samples file to a profile, without measuring anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.fitting import Sample, predicted_seconds
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, Bandwidth, Coefficients, CostProfile, parse_cost_profile
from fcp_cli.profiling.assemble import profile_from_samples
from fcp_cli.profiling.measurement import Measurement, model_figures
from fcp_cli.profiling.samples import SamplesFile
from fcp_cli.report.profiles import reading
from tests.messages import raises

TRUTH = CostProfile(
    model="qwen3-tiny",
    cluster="this-machine",
    origin="assumed",
    coefficients=Coefficients(
        attention_seconds_per_token2=3e-8,
        linear_seconds_per_token=5e-5,
        ring_bytes_per_token=3072,
        microbatch_seconds=4e-3,
        ring_hop_seconds=3e-3,
    ),
    bandwidth=Bandwidth(intra_node=4e8, inter_node=4e8),
)
ENVIRONMENT = {"kind": "environment", "at": "now", "device": "cpu", "ranks_per_node": 4, "device_memory_bytes": 8e9}


MEASUREMENT = Measurement(
    model="qwen3-tiny",
    cluster="this-machine",
    ranks=4,
    degrees=(1, 2, 4),
    max_length=2048,
    device="cpu",
    dtype="float32",
    layers=(2,),
    budget_seconds=1.0,
    samples=Path("samples.jsonl"),
)


def samples_of(
    truth: CostProfile, *, measurement: Measurement = MEASUREMENT, observed: int | None = None, **environment: Any
) -> SamplesFile:
    """What four ranks would have written if every pack took what `truth` says; memory of 40 kB per token."""
    points = measurement.points()[:observed]
    drawn = [_drawn(point.lengths, point.degree) for point in points]
    lines: list[dict[str, Any]] = [{**ENVIRONMENT, **environment}]
    lines += [
        {"kind": "observation", "point": point.key, "layers": measurement.layers[0], "seconds": [seconds] * 3}
        for point, seconds in zip(points, predicted_seconds(drawn, truth).tolist(), strict=True)
    ]
    lines += [{"kind": "memory", "tokens": tokens, "peak_bytes": 1e6 + 4e4 * tokens} for tokens in (512, 1024, 2048)]
    lines.append({"kind": "step", "layers": 2, "seconds": [0.01], "state_bytes": 7_000_000})
    figures = model_figures(measurement.model)
    return SamplesFile(subject=measurement.subject(), figures=figures, lines=lines)


def _drawn(lengths: tuple[int, ...], degree: int) -> Sample:
    return Sample(lengths=lengths, degree=degree, seconds=1.0)


def test_exposed_rings_make_a_profile_with_an_exposed_share_that_says_what_it_gains() -> None:
    exposed = replace(TRUTH, coefficients=replace(TRUTH.coefficients, exposed_ring_share=0.8))
    profile = profile_from_samples(samples_of(exposed))
    assert profile.common_ground is not None
    assert profile.coefficients.exposed_ring_share == pytest.approx(0.8, abs=0.05)
    errors = profile.measurement["held_out_error_percent_by_model"]
    assert errors[EXPOSED_RING] < 0.5 < errors[HIDDEN_RING]
    assert any("of a ring is exposed; held-out error 0." in line for line in reading(profile, (2,)))
    assert parse_cost_profile(profile.text, name="x").common_ground == profile.common_ground
    ground = profile.on_common_ground()
    assert ground.bandwidth.inter_node == ground.bandwidth.intra_node  # one node: nothing is beyond it


def test_rings_that_hide_make_a_profile_without_an_exposed_share() -> None:
    profile = profile_from_samples(samples_of(TRUTH))
    assert profile.common_ground is None
    assert profile.memory.bytes_per_token == pytest.approx(4e4)
    assert profile.measurement["step_seconds"] == 0.01


def test_a_profile_of_ranks_that_shared_cores_says_so() -> None:
    profile = profile_from_samples(samples_of(TRUTH, shares_cores=True, cores=2))
    assert "Measured with 4 ranks on 2 cores: times include that." in reading(profile, (2,))


def test_too_few_points_name_those_that_are_missing() -> None:
    with raises(
        snapshot(
            "ProfileError: only 3 points were observed, and a fit needs at least 5; missing: 64 at degree 1, 128 at degree 2, 256 at degree 4, 64+64+64+64+64+64+64+64 at degree 4, 128 at degree 1; the same command with more --budget-minutes measures them"
        )
    ):
        profile_from_samples(samples_of(TRUTH, observed=3))
