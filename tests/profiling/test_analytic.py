from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.model import causal_work, pack_parts
from fcp_cli.cost.profile import Coefficients, CostProfile, StepTerms, Sync, dump_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import KernelName, Recipe, Recompute, ZeroStage
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import patch_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import COMMUNICATOR_BYTES, Cut
from fcp_cli.models.cluster import ClusterSpec, load_cluster, shipped_profile
from fcp_cli.models.model import forward_operations, load_model, shipped_names
from fcp_cli.profiling.computed import analytic_profile, messages_per_hop, ring_bytes_per_token
from tests.messages import raises

ZERO_2 = Recipe(zero_stage=2)
# Nothing of them fits the 64 devices of 64 GB of the example cluster: no profile of them is shipped.
TOO_LARGE = ("qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "glm-4.5")


def _profile(model: str = "qwen3-8b", *, recipe: Recipe = ZERO_2, sync: Sync = "iteration", **cut: int) -> CostProfile:
    return analytic_profile(
        load_model(model), load_cluster("example-8x8"), recipe=recipe, sync=sync, ranks=64, cut=Cut(**cut)
    )


def test_what_closes_a_step_and_floors_a_wave_follows_from_the_links_that_ranks_share() -> None:
    spec, h100 = load_model("qwen3-8b"), load_cluster("h100-8x8")
    one_link = replace(h100, links_per_node=1)

    def step(cluster: ClusterSpec, sync: Sync, zero_stage: ZeroStage, **given: Any) -> StepTerms:
        recipe = Recipe(zero_stage=zero_stage, **given)
        return analytic_profile(spec, cluster, recipe=recipe, sync=sync, ranks=64).step

    # Weights in bf16 for forward and backward, gradients in fp32: 8 bytes of 63 / 64 of the parameters over one link.
    gathered = spec.parameters * 8 * 63 / 64 / 45e9
    assert step(one_link, "microbatch", 3).wave_floor_seconds == pytest.approx(gathered, rel=1e-6)
    assert step(h100, "microbatch", 3).wave_floor_seconds == pytest.approx(gathered / 8, rel=1e-6)  # 8 links
    assert step(one_link, "iteration", 2).tail_seconds == pytest.approx(gathered * 6 / 8, rel=1e-6)
    inside = step(one_link, "microbatch", 3, shard_ranks=8, reduce="step")  # no wave sends anything out of its node
    assert inside.wave_floor_seconds == pytest.approx(spec.parameters * 4 * 7 / 8 / 370e9, rel=1e-6)
    assert inside.update_seconds > 0.5 * gathered
    assert step(replace(h100, links_per_node=None), "microbatch", 3) == StepTerms()


def test_a_profile_of_one_kernel_is_not_answered_for_another() -> None:
    spec, h100 = load_model("qwen3-8b"), load_cluster("h100-8x8")
    first, other = (
        analytic_profile(spec, cluster, recipe=ZERO_2, sync="iteration", ranks=64)
        for cluster in (h100, h100.running("fa2"))
    )
    assert other.attention_kernel == "fa2" != first.attention_kernel
    quadratic = [one.coefficients.attention_seconds_per_token2 for one in (first, other)]
    assert quadratic[1] > 1.2 * quadratic[0]


def test_attention_costs_by_the_rates_of_its_kernel() -> None:
    spec, h100 = load_model("qwen3-8b"), load_cluster("h100-8x8")

    def coefficients(kernel: KernelName, **rate: float) -> Coefficients:
        cluster = replace(h100, attention={kernel: replace(h100.attention[kernel], **rate)})
        return analytic_profile(
            spec, cluster, recipe=Recipe(recompute="full"), sync="microbatch", ranks=64
        ).coefficients

    forward_operations_per_pair, peak = 294_912, 989e12
    for kernel, rate in h100.attention.items():
        seconds = forward_operations_per_pair / peak * (2 / rate.forward + 2.5 / rate.backward)
        assert coefficients(kernel).attention_seconds_per_token2 == pytest.approx(seconds)
        found, without = coefficients(kernel), coefficients(kernel, token_pairs=0.0)
        per_token = found.linear_seconds_per_token - without.linear_seconds_per_token
        assert per_token == pytest.approx(rate.token_pairs * seconds)
        per_hop = found.chunk_seconds_per_token - without.chunk_seconds_per_token
        assert per_hop == pytest.approx(0.75 * per_token)
    assert coefficients("fa2").attention_seconds_per_token2 > 1.6 * coefficients("cudnn").attention_seconds_per_token2


def test_operations_of_the_layers_are_those_of_the_papers_models() -> None:
    spec = load_model("qwen3-8b")
    operations = forward_operations(spec)
    without_output_layer = operations.linear_per_token - 2 * spec.embedding_parameters
    assert without_output_layer == pytest.approx(13.89e9, rel=1e-3)
    assert operations.attention_per_token2 == 294_912
    assert without_output_layer / operations.attention_per_token2 == pytest.approx(47_104, rel=1e-3)


def test_an_8b_model_at_160_teraflops() -> None:
    c = _profile().coefficients
    assert c.attention_seconds_per_token2 == pytest.approx(6.451e-9, rel=1e-3)
    assert c.linear_seconds_per_token == pytest.approx(2.838e-4, rel=1e-3)


def test_grouped_query_attention_sends_key_value_heads_only() -> None:
    spec = load_model("qwen3-8b")
    assert ring_bytes_per_token(spec, kv_bytes=2, gradient_bytes=2) == 442_368
    assert _profile().coefficients.ring_bytes_per_token == 589_824  # gradients travel in fp32


def test_a_hop_is_as_many_messages_as_all_layers_send_forward_and_backward() -> None:
    spec, cluster = load_model("qwen3-8b"), replace(load_cluster("example-8x8"), message_seconds=1e-5)

    def hop_seconds(recompute: Recompute = "none", **cut: int) -> float:
        recipe = replace(ZERO_2, recompute=recompute)
        profile = analytic_profile(spec, cluster, recipe=recipe, sync="iteration", ranks=64, cut=Cut(**cut))
        return profile.coefficients.ring_hop_seconds

    assert hop_seconds() == pytest.approx(36 * 2 * 1e-5)  # K/V forward, K/V with dK/dV backward
    assert hop_seconds("full") == pytest.approx(36 * 3 * 1e-5)
    assert hop_seconds("selective") == hop_seconds()  # what attention computed is kept: no ring runs again
    assert hop_seconds(pipeline_parallel=2) == pytest.approx(18 * 2 * 1e-5)  # a stage's rings


def test_attention_may_hide_the_whole_ring() -> None:
    """As the runtime's does: a kernel runs while the last gradients travel home."""
    profile = analytic_profile(
        load_model("qwen3-8b"), load_cluster("h200-8x8"), recipe=ZERO_2, sync="iteration", ranks=64
    )
    work = causal_work(np.array([2_000_000]), profile.coefficients)
    parts = pack_parts(profile, work, degree=64, crosses_nodes=True)
    assert parts.attention[0] > parts.hidden[0] > 0
    assert parts.exposed[0] == 0


def test_recomputation_adds_a_forward_and_saves_activations() -> None:
    plain, again = _profile(), _profile(recipe=replace(ZERO_2, recompute="full"))
    ratio = again.coefficients.linear_seconds_per_token / plain.coefficients.linear_seconds_per_token
    assert ratio == pytest.approx(4 / 3)
    assert again.memory.bytes_per_token < plain.memory.bytes_per_token / 3


def test_selective_recomputation_runs_the_matrices_again_and_neither_attention_nor_ring() -> None:
    plain, again = _profile().coefficients, _profile(recipe=replace(ZERO_2, recompute="selective")).coefficients
    assert again.linear_seconds_per_token == pytest.approx(4 / 3 * plain.linear_seconds_per_token)
    assert again.attention_seconds_per_token2 == plain.attention_seconds_per_token2
    assert again.ring_bytes_per_token == plain.ring_bytes_per_token


def test_a_profile_says_which_recipe_and_sync_it_is_of() -> None:
    recipe = Recipe(zero_stage=3, precision="amp", recompute="full")
    profile = _profile(recipe=recipe, sync="microbatch")
    assert (profile.recipe, profile.sync) == (recipe, "microbatch")
    assert profile.memory == rank_memory(load_model("qwen3-8b"), recipe, sync="microbatch", ranks=64).as_profile_memory(
        64e9 * 0.92
    )


def test_a_recipe_that_the_sync_rules_out_is_rejected() -> None:
    with pytest.raises(UsageError, match="--zero 3 gathers weights in every micro-batch"):
        _profile(recipe=Recipe(zero_stage=3))


def test_tensor_parallelism_divides_everything_of_a_rank() -> None:
    one, two = _profile(), _profile(tensor_parallel=2)
    for name in ("attention_seconds_per_token2", "linear_seconds_per_token", "ring_bytes_per_token"):
        assert getattr(two.coefficients, name) == pytest.approx(getattr(one.coefficients, name) / 2)
    assert two.memory.bytes_per_token == pytest.approx(one.memory.bytes_per_token / 2)
    shared_out = one.memory.model_state_bytes - 2 * COMMUNICATOR_BYTES
    assert two.memory.model_state_bytes - 2 * COMMUNICATOR_BYTES == pytest.approx(shared_out / 2)


def test_ranks_that_share_out_experts_hold_a_part_of_them_and_send_tokens() -> None:
    spec = load_model("qwen3-30b-a3b")
    recipe = replace(ZERO_2, zero_stage=1)
    one, eight = (_profile(spec.name, recipe=recipe, expert_parallel=ranks) for ranks in (1, 8))
    # Weights in bf16 and gradients in fp32 of 7 of 8 experts; the optimizer's shares are the same.
    away = spec.expert_parameters * 7 / 8 * (2 + 4)
    assert one.memory.model_state_bytes - eight.memory.model_state_bytes == pytest.approx(away, rel=0.01)
    # To eight experts and back, forward and backward, in bf16: 7 of 8 go to other ranks of the node.
    sent = 48 * 8 * 2048 * 2 * 2 * 2 * 7 / 8
    more = eight.coefficients.linear_seconds_per_token - one.coefficients.linear_seconds_per_token
    assert more == pytest.approx(sent / 50e9)
    assert (one.expert_parallel, eight.expert_parallel) == (1, 8)


@pytest.mark.parametrize(
    ("model", "among", "message"),
    [
        ("qwen3-8b", 2, snapshot("UsageError: --expert-parallel is 2, and qwen3-8b has no experts; remove it")),
        (
            "qwen3-30b-a3b",
            3,
            snapshot("UsageError: --expert-parallel 3 does not divide the experts of a layer, 128 of qwen3-30b-a3b"),
        ),
        (
            "qwen3-30b-a3b",
            128,
            snapshot("UsageError: --expert-parallel 128 does not divide the ranks, 64 of qwen3-30b-a3b"),
        ),
    ],
)
def test_experts_that_cannot_be_shared_out_are_rejected(model: str, among: int, message: str) -> None:
    with raises(message):
        _profile(model, expert_parallel=among)


def test_only_what_attends_by_softmax_goes_round_a_ring_and_grows_with_the_square() -> None:
    hybrid, latent = load_model("qwen3-next"), load_model("deepseek-v3")
    assert ring_bytes_per_token(hybrid, kv_bytes=2, gradient_bytes=4) == 12 * 2 * 2 * 256 * (2 + 2 + 4)
    assert ring_bytes_per_token(latent, kv_bytes=2, gradient_bytes=4) == 61 * 128 * (192 + 128) * (2 + 2 + 4)
    assert forward_operations(hybrid).attention_per_token2 == 12 * 16 * 2 * 256
    assert forward_operations(latent).attention_per_token2 == 61 * 128 * (192 + 128)


def test_a_cut_that_the_model_does_not_allow_is_rejected() -> None:
    with raises(snapshot("UsageError: --tensor-parallel 3 does not divide num_heads 32 of qwen3-8b")):
        _profile(tensor_parallel=3)
    with pytest.raises(UsageError, match=r"--pipeline-parallel 64 exceeds the 36 layers"):
        _profile(pipeline_parallel=64)


def test_vision_work_is_counted_by_patch_and_by_pair_of_patches() -> None:
    with_vision, without = _profile("qwen3-vl-8b").coefficients, _profile("qwen3-8b").coefficients
    assert without.vision_seconds_per_patch == without.vision_seconds_per_patch2 == 0
    # 27 blocks of 4 h^2 + 2 h f matrix entries: 0.411e9, three passes of two operations each at 160 TFLOP/s.
    assert with_vision.vision_seconds_per_patch == pytest.approx(3 * 2 * 0.411e9 / 160e12, rel=0.12)
    assert with_vision.vision_seconds_per_patch2 == pytest.approx(3.5 * 4 * 27 * 1152 / 160e12)


def test_a_frozen_encoder_has_no_backward_no_gradients_and_keeps_nothing() -> None:
    trained, frozen = _profile("qwen3-vl-8b"), _profile("qwen3-vl-8b", recipe=replace(ZERO_2, freeze_vision=True))
    vision = load_model("qwen3-vl-8b").vision
    assert vision is not None
    ratio = frozen.coefficients.vision_seconds_per_patch / trained.coefficients.vision_seconds_per_patch
    assert ratio == pytest.approx(1 / 3)
    ratio = frozen.coefficients.vision_seconds_per_patch2 / trained.coefficients.vision_seconds_per_patch2
    assert ratio == pytest.approx(1 / 3.5)
    items = [
        rank_memory(load_model("qwen3-vl-8b"), recipe, sync="iteration", ranks=64).items(16_384)
        for recipe in (ZERO_2, replace(ZERO_2, freeze_vision=True))
    ]
    assert items[0]["gradients"] - items[1]["gradients"] == pytest.approx(4 * vision.parameters)
    assert items[0]["optimizer"] - items[1]["optimizer"] == pytest.approx(8 / 64 * vision.parameters)
    assert items[0]["visual tokens"] == 16_384 * 4 * vision.depth * patch_bytes(vision, precision_of(ZERO_2))
    assert "visual tokens" not in items[1]
    assert trained.memory.bytes_per_token > frozen.memory.bytes_per_token
    assert frozen.coefficients.linear_seconds_per_token == trained.coefficients.linear_seconds_per_token


def test_frozen_matrices_have_no_gradients_of_their_own() -> None:
    whole, tuned = (_profile(recipe=recipe).coefficients for recipe in (ZERO_2, replace(ZERO_2, lora="r=16")))
    # Forward and the gradient of the input, of three passes; adapters are 0.6 % of the matrices.
    ratio = tuned.linear_seconds_per_token / whole.linear_seconds_per_token
    assert ratio == pytest.approx((2 + 3 * 0.00577) / 3, rel=1e-3)
    same = ("attention_seconds_per_token2", "ring_bytes_per_token", "ring_hop_seconds")
    assert all(getattr(tuned, name) == getattr(whole, name) for name in same)


def test_layers_before_the_first_trained_one_have_no_backward_and_keep_nothing() -> None:
    half = replace(ZERO_2, freeze="embed_tokens.*,layers.[0-9].*,layers.1[0-7].*")  # 18 of 36 layers
    whole, tuned = (_profile(recipe=recipe).coefficients for recipe in (ZERO_2, half))
    ratio = tuned.attention_seconds_per_token2 / whole.attention_seconds_per_token2
    assert ratio == pytest.approx((1 + 2.5 / 2) / 3.5)
    assert tuned.ring_bytes_per_token == 36 * 2 * 1024 * (2 + (2 + 4) / 2)  # half of the layers send K/V and dK/dV back
    kept = [
        rank_memory(load_model("qwen3-8b"), recipe, sync="iteration", ranks=64).items(16_384)["activations"]
        for recipe in (ZERO_2, half)
    ]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.02)


@pytest.mark.parametrize("trained", [{"freeze": "visual.*"}, {"lora": "r=16"}])
def test_an_encoder_of_which_nothing_is_trained_costs_what_a_frozen_one_does(trained: dict[str, Any]) -> None:
    frozen = _profile("qwen3-vl-8b", recipe=replace(ZERO_2, freeze_vision=True))
    tuned = _profile("qwen3-vl-8b", recipe=replace(ZERO_2, **trained))
    for name in ("vision_seconds_per_patch", "vision_seconds_per_patch2"):
        assert getattr(tuned.coefficients, name) == getattr(frozen.coefficients, name)
    assert tuned.memory.bytes_per_token <= frozen.memory.bytes_per_token


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            replace(ZERO_2, freeze_vision=True),
            snapshot("UsageError: --freeze-vision: qwen3-8b has no vision encoder"),
        ),
        (
            replace(ZERO_2, lora="target=query"),
            snapshot(
                "UsageError: --lora: query names no linear layer of qwen3-8b; q_proj+v_proj are some, or all-linear"
            ),
        ),
        (
            replace(ZERO_2, freeze="*"),
            snapshot("UsageError: --freeze * leaves nothing of qwen3-8b to train; remove some of its patterns"),
        ),
    ],
    ids=["no encoder", "no such layer", "everything is frozen"],
)
def test_a_recipe_that_trains_nothing_of_the_model_is_rejected(recipe: Recipe, message: str) -> None:
    with raises(message):
        _profile("qwen3-8b", recipe=recipe)


def test_an_analytic_profile_is_a_cost_profile() -> None:
    profile = _profile("internvl3-8b")
    assert parse_cost_profile(dump_cost_profile(profile), name="x") == profile


@pytest.mark.parametrize("model", [name for name in shipped_names("model") if name not in TOO_LARGE])
def test_shipped_profiles_are_priced_as_the_formulas_do(model: str) -> None:
    """Their memory is not compared: a plan works it out anew, for its own ranks."""
    shipped = shipped_profile(model)
    assert shipped.recipe is not None and shipped.sync is not None
    found = _profile(model, recipe=shipped.recipe, sync=shipped.sync)
    assert found.coefficients == shipped.coefficients
    assert found.bandwidth == shipped.bandwidth


def test_the_token_budget_falls_with_the_state_and_the_activations() -> None:
    spec, recipe = load_model("qwen3-8b"), replace(ZERO_2, recompute="full")
    held = rank_memory(spec, recipe, sync="iteration", ranks=64)
    budget = _profile(recipe=recipe).memory.tokens_per_rank()
    assert budget is not None
    assert held.total_bytes(budget) <= 64e9 * 0.92 < held.total_bytes(budget + 1)


def test_states_of_linear_attention_go_up_a_ring_and_down_again() -> None:
    hybrid = load_model("qwen3-next")
    assert messages_per_hop(hybrid) == 2 * (12 + 2 * 36)
    assert messages_per_hop(hybrid, recompute=True, reached=0.5) == (12 + 2 * 36) * 2
