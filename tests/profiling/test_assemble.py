"""From a samples file to a profile, without measuring anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.fitting import Sample, predicted_seconds
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, Bandwidth, Coefficients, CostProfile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.memory.activations import ring_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import analytic_profile, counted_heads
from fcp_cli.profiling.fits import profile_from_samples
from fcp_cli.profiling.samples import Measurement, SamplesFile, model_figures
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
    recipe=Recipe(precision="fp32"),
    sync="iteration",
    layers=(2,),
    budget_seconds=1.0,
    samples=Path("samples.jsonl"),
)


def samples_of(
    truth: CostProfile, *, measurement: Measurement = MEASUREMENT, observed: int | None = None, **environment: Any
) -> SamplesFile:
    """What four ranks would have written if every pack took what `truth` says; memory of 40 kB per token."""
    points = measurement.points()[:observed]
    drawn = [_drawn(point.lengths, point.degree, point.heads_degree) for point in points]
    lines: list[dict[str, Any]] = [{**ENVIRONMENT, **environment}]
    lines += [
        {"kind": "observation", "point": point.key, "layers": measurement.layers[0], "seconds": [seconds] * 3}
        for point, seconds in zip(points, predicted_seconds(drawn, truth).tolist(), strict=True)
    ]
    lines += [{"kind": "memory", "tokens": tokens, "peak_bytes": 1e6 + 4e4 * tokens} for tokens in (512, 1024, 2048)]
    lines.append({"kind": "step", "layers": 2, "seconds": [0.01], "state_bytes": 7_000_000})
    figures = model_figures(measurement.model)
    return SamplesFile(subject=measurement.subject(), figures=figures, lines=lines)


def _drawn(lengths: tuple[int, ...], degree: int, heads_degree: int = 1) -> Sample:
    return Sample(lengths=lengths, degree=degree, heads_degree=heads_degree, seconds=1.0)


def test_what_hosts_took_to_issue_packs_becomes_the_profile_s_second_clock() -> None:
    """With packs that all take longer on their devices: only the host's own lines say what it takes."""
    samples = samples_of(TRUTH, device="cuda")
    points = {point.degree: point for point in reversed(MEASUREMENT.points())}
    hosts = [
        {"kind": "host", "point": points[degree].key, "layers": 2, "seconds": [seconds] * 3}
        for degree, seconds in ((1, 1e-3), (2, 1.5e-3), (4, 2.5e-3))
    ]
    c = profile_from_samples(replace(samples, lines=[*samples.lines, *hosts])).coefficients
    assert c.host_microbatch_seconds == pytest.approx(1e-3, rel=0.05)
    assert c.microbatch_seconds == pytest.approx(4e-3, rel=0.05)
    assert c.host_hop_seconds == pytest.approx(5e-4)
    assert profile_from_samples(samples).coefficients.host_microbatch_seconds == 0.0


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


def test_what_exchanges_take_is_fitted_beside_rings_and_foretells_rings_of_sets() -> None:
    counted = counted_heads(load_model("qwen3-tiny"), MEASUREMENT.recipe, message_seconds=0.0)
    heads = replace(counted, bandwidth_share=0.25, exchange_seconds=6e-3)
    profile = profile_from_samples(samples_of(replace(TRUTH, heads=heads)))
    assert profile.heads is not None
    assert profile.heads.bandwidth_share * profile.bandwidth.intra_node == pytest.approx(0.25 * 4e8, rel=0.1)
    assert profile.heads.exchange_seconds == pytest.approx(6e-3, rel=0.1)
    assert replace(profile.heads, bandwidth_share=1.0, exchange_seconds=0.0) == counted
    groups = {(row["degree"], row["heads_degree"]): row for row in profile.measurement["error_by_degree"]}
    assert set(groups) == {(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)}
    assert groups[4, 2]["points"] == 0, "sets that form a ring are foretold"
    assert all(row["held_out_percent"] < 2.0 for row in groups.values())
    assert parse_cost_profile(profile.text, name="x").heads == profile.heads


def test_one_rank_observes_no_exchanges_and_keeps_those_of_its_cluster() -> None:
    alone = replace(MEASUREMENT, ranks=1)
    assert all(point.heads_degree == 1 for point in alone.points())
    on_cluster = replace(alone, cluster="h100-8x8")
    computed = analytic_profile(
        load_model("qwen3-tiny"), load_cluster("h100-8x8"), recipe=alone.recipe, sync="iteration", ranks=1
    )
    assert profile_from_samples(samples_of(TRUTH, measurement=on_cluster)).heads == computed.heads


def test_rings_that_hide_make_a_profile_without_an_exposed_share() -> None:
    profile = profile_from_samples(samples_of(TRUTH))
    assert profile.common_ground is None
    held = rank_memory(load_model("qwen3-tiny"), Recipe(precision="fp32"), sync="iteration", ranks=4, on_cpu=True)
    assert profile.memory.model_state_bytes == pytest.approx(held.as_profile_memory(8e9 * 0.92).model_state_bytes)
    assert profile.measurement["step_seconds"] == 0.01


def test_measured_bytes_grow_by_the_buffers_that_ranks_in_rings_hold() -> None:
    spec = load_model("qwen3-tiny")
    (kind,) = spec.kinds
    buffers = ring_bytes(spec, kind, precision_of(MEASUREMENT.recipe))
    assert buffers > 1000
    assert profile_from_samples(samples_of(TRUTH)).memory.bytes_per_token == pytest.approx(4e4 + buffers)


def test_a_profile_of_ranks_that_shared_cores_says_so() -> None:
    profile = profile_from_samples(samples_of(TRUTH, shares_cores=True, cores=2))
    assert "Measured with 4 ranks on 2 cores: times include that." in reading(profile, (2,))


def test_too_few_points_scale_the_model_s_own_figures_and_say_how_to_go_on() -> None:
    samples = samples_of(TRUTH, observed=3)
    profile = profile_from_samples(samples)
    assert profile.measurement["warnings"] == snapshot(
        [
            "3 samples are too few: a fit needs at least 5; 2 more are missing, so that there are packs of three different lengths or more; the model's own figures were scaled to what was observed; missing: 64 at degree 1, 128 at degree 2, 256 at degree 4, 64+64+64+64+64+64+64+64 at degree 4, 128 at degree 1; the same command with more --budget-minutes measures them"
        ]
    )
    seen = [point["predicted_seconds"] / point["seconds"] for point in profile.measurement["points"]]
    assert sorted(seen)[1] == pytest.approx(1.0, rel=0.02)  # the median of what was observed is met
    assert any("from the model's figures, times" in line for line in profile.measurement["assumed"])
    assert parse_cost_profile(profile.text, name="x").coefficients == profile.coefficients


def test_packs_that_are_too_alike_for_a_fit_become_a_profile_too() -> None:
    whole = samples_of(TRUTH)
    alike = [line for line in whole.lines if line["kind"] != "observation" or line["point"].endswith(":64")]
    profile = profile_from_samples(replace(whole, lines=alike))
    (warning,) = profile.measurement["warnings"]
    assert "the model's own figures were scaled to what was observed" in warning


def test_nothing_observed_is_no_profile_and_says_how_to_go_on() -> None:
    with raises(
        snapshot(
            "ProfileError: no pack was observed; missing: 64 at degree 4, 64 at degree 2, 128 at degree 4, 64 at degree 1, 128 at degree 2; the same command with more --budget-minutes measures them, and 'fcp profile --analytic' computes a profile"
        )
    ):
        profile_from_samples(samples_of(TRUTH, observed=0))


def test_what_is_assumed_of_memory_can_be_asked_for_afterwards_and_what_is_timed_cannot() -> None:
    samples = samples_of(TRUTH)
    profile = profile_from_samples(samples, request=RecipeRequest(zero="3"))
    assert (profile.recipe, profile.sync) == (Recipe(zero_stage=3, precision="fp32"), "microbatch")
    with raises(
        snapshot(
            "UsageError: --recompute full: the samples were measured with --recompute none, and times differ; measure with 'fcp profile --recompute full'"
        )
    ):
        profile_from_samples(samples, request=RecipeRequest(recompute="full"))


def test_times_of_adapters_are_those_that_were_measured_less_what_frozen_matrices_need_not() -> None:
    samples = samples_of(TRUTH)
    whole, tuned = (profile_from_samples(samples, request=RecipeRequest(lora=lora)) for lora in (None, "r=4"))
    assert tuned.recipe == replace(MEASUREMENT.recipe, lora="r=4")
    of_matrices = (2 + 3 * 0.0457) / 3  # adapters of rank 4 are 4.57 % of a tiny model's matrices
    ratio = tuned.coefficients.linear_seconds_per_token / whole.coefficients.linear_seconds_per_token
    spec, cluster = load_model("qwen3-tiny"), load_cluster("this-machine")
    computed = analytic_profile(spec, cluster, recipe=MEASUREMENT.recipe, sync="iteration", ranks=4).coefficients
    matrices = 6 * spec.matrix_parameters / cluster.matrix_rate(spec.hidden_size)
    saved = (1 - of_matrices) * matrices / computed.linear_seconds_per_token  # what is not of matrices stays
    assert ratio == pytest.approx(1 - saved, rel=1e-3)
    assert tuned.coefficients.attention_seconds_per_token2 == whole.coefficients.attention_seconds_per_token2
    assert tuned.memory.model_state_bytes < whole.memory.model_state_bytes
    assert tuned.measurement["assumed"][-1] == snapshot(
        "coefficients: measured with the full language model trained, then scaled to the trained part: linear_seconds_per_token x 0.788"
    )
    assert tuned.measurement["points"] == whole.measurement["points"]
