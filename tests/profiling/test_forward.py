"""A profile of forward passes is one of training without what a backward adds."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from fcp_cli.cost.profile import StepTerms, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, Recompute
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import forward_operations, load_model
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.profiling.forward import forward_profile, forward_shares


@pytest.mark.parametrize("recompute", get_args(Recompute)[:-1])  # the last mixes others
def test_whatever_is_recomputed_a_forward_costs_what_its_operations_and_its_keys_and_values_cost(
    recompute: Recompute,
) -> None:
    spec, cluster = load_model("qwen3-8b"), load_cluster("h100-8x8")
    recipe = Recipe(zero_stage=3, recompute=recompute)
    forward = forward_profile(analytic_profile(spec, cluster, recipe=recipe, sync="microbatch", ranks=64))
    c, operations = forward.coefficients, forward_operations(spec)
    matrix_rate = cluster.peak_flops * cluster.linear_efficiency
    # Attention's work per token has the share of matrices, which differs from its own by a little.
    attention_rate = cluster.peak_flops * cluster.attention_rate.forward
    per_token = cluster.attention_rate.token_pairs * operations.attention_per_token2 / attention_rate
    assert c.linear_seconds_per_token == pytest.approx(operations.linear_per_token / matrix_rate + per_token, rel=0.01)
    assert c.attention_seconds_per_token2 == pytest.approx(operations.attention_per_token2 / attention_rate)
    assert c.ring_bytes_per_token == pytest.approx(2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim)
    assert forward.phase == "forward" and forward_profile(forward) is forward
    assert parse_cost_profile(forward.text, name="the profile") == forward


def test_a_wave_gathers_weights_once_and_a_step_sums_and_updates_nothing() -> None:
    spec, cluster = load_model("qwen3-8b"), load_cluster("h100-8x8")
    recipe = Recipe(zero_stage=3)
    training = analytic_profile(spec, cluster, recipe=recipe, sync="microbatch", ranks=64)
    # bf16 weights forward and backward, and gradients in fp32: 8 bytes, of which the forward's gather is 2.
    assert forward_profile(training).step == StepTerms(
        wave_floor_seconds=training.step.wave_floor_seconds / 4, lockstep=training.step.lockstep
    )


def test_a_frozen_encoder_takes_as_long_without_a_backward() -> None:
    spec = load_model("qwen3-vl-8b")
    assert forward_shares(spec, Recipe(freeze_vision=True))["vision_seconds_per_patch"] == 1.0
    assert forward_shares(spec, Recipe())["vision_seconds_per_patch"] == pytest.approx(1 / 3)
    assert forward_shares(spec, Recipe())["vision_seconds_per_patch2"] == pytest.approx(1 / 3.5)


def test_a_profile_of_a_model_that_nobody_knows_has_the_usual_shares_on_both_grounds() -> None:
    known = analytic_profile(
        load_model("qwen3-8b"), load_cluster("h100-8x8"), recipe=Recipe(zero_stage=2), sync="iteration", ranks=8
    )
    unknown = replace(known, model="our-own", recipe=None)
    assert forward_profile(unknown).coefficients == forward_profile(known).coefficients
    assert forward_profile(unknown).on_common_ground().phase == "forward"
