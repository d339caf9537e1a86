from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.profile import CostProfile, Sync, dump_cost_profile, parse_cost_profile
from fcp_cli.errors import UsageError
from fcp_cli.memory.activations import patch_bytes
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import COMMUNICATOR_BYTES
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.descriptions import shipped_names
from fcp_cli.models.memory import (
    PRECISIONS,
    Parallelism,
    choose_zero_stage,
    layer_activation_bytes,
    model_state,
    patch_activation_bytes,
)
from fcp_cli.models.model import VisionSpec, load_model
from fcp_cli.models.shipped import shipped_profile
from fcp_cli.models.transformers_config import text_config, whole_config
from fcp_cli.profiling.analytic import analytic_profile, forward_operations, ring_bytes_per_token
from fcp_cli.recipe import Recipe, Recompute
from tests.messages import raises

ZERO_2 = Recipe(zero_stage=2)


def _profile(model: str = "qwen3-8b", *, recipe: Recipe = ZERO_2, sync: Sync = "iteration", **cut: int) -> CostProfile:
    return analytic_profile(load_model(model), load_cluster("example-8x8"), recipe=recipe, sync=sync, ranks=64, **cut)


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
        profile = analytic_profile(spec, cluster, recipe=recipe, sync="iteration", ranks=64, **cut)
        return profile.coefficients.ring_hop_seconds

    assert hop_seconds() == pytest.approx(36 * 3 * 1e-5)  # K/V forward, K/V and dK/dV backward
    assert hop_seconds("full") == pytest.approx(36 * 4 * 1e-5)
    assert hop_seconds("selective") == hop_seconds()  # what attention computed is kept: no ring runs again
    assert hop_seconds(pipeline_parallel=2) == pytest.approx(18 * 3 * 1e-5)  # a stage's rings


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


def test_each_zero_stage_holds_less() -> None:
    spec = load_model("qwen3-8b")
    sizes = [
        model_state(spec, PRECISIONS["bf16"], Parallelism(ranks=64, zero_stage=stage)).total_bytes for stage in range(4)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(18 * spec.parameters)
    assert sizes[1] == pytest.approx((6 + 12 / 64) * spec.parameters)
    assert sizes[2] == pytest.approx((2 + 16 / 64) * spec.parameters)


def test_the_least_zero_stage_that_leaves_room_is_chosen() -> None:
    small, large = load_model("qwen3-1.7b"), load_model("qwen3-8b")
    assert choose_zero_stage(small, PRECISIONS["bf16"], ranks=64, device_bytes=64e9) == 1
    assert choose_zero_stage(large, PRECISIONS["bf16"], ranks=64, device_bytes=64e9) == 2
    assert choose_zero_stage(large, PRECISIONS["bf16"], ranks=64, device_bytes=16e9) == 3


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


def test_a_model_without_an_encoder_cannot_freeze_it() -> None:
    with pytest.raises(UsageError, match="--freeze-vision: qwen3-8b has no vision encoder"):
        _profile("qwen3-8b", recipe=replace(ZERO_2, freeze_vision=True))


@pytest.mark.hf
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("name", ["qwen3-vl-8b", "internvl3-8b"])
def test_encoder_activations_are_those_that_autograd_keeps(name: str, precision: str) -> None:
    vision = load_model(name).vision
    assert vision is not None
    small = replace(vision, hidden_size=64, ffn_size=96, num_heads=4, deepstack_layers=())
    one, two = (_kept_bytes_per_patch(name, replace(small, depth=depth), precision) for depth in (1, 2))
    # A class token among 1,024 patches, and autocast's copies of biases, do not grow with them.
    assert two - one == pytest.approx(patch_activation_bytes(small, PRECISIONS[precision]), rel=2e-3)


def _kept_bytes_per_patch(name: str, vision: VisionSpec, precision: str) -> float:
    """Bytes of distinct storages that autograd saved in an encoder's forward, parameters left out."""
    import torch
    from transformers import AutoConfig, AutoModel

    model_type, figures = whole_config(replace(load_model(name), vision=vision, num_layers=1))
    config = AutoConfig.for_model(model_type, **figures).vision_config
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    encoder = AutoModel.from_config(config).to(dtype)  # type: ignore[no-untyped-call]
    if vision.kind == "qwen3_vl":
        pixels, arguments = torch.zeros(1024, 3 * 2 * 16 * 16), {"grid_thw": torch.tensor([[1, 32, 32]])}
    else:
        pixels, arguments = torch.zeros(1, 3, 448, 448), {}
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "amp")
    with _KeptStorages(encoder) as kept, autocast:
        encoder(pixels.to(dtype), **arguments)
    copies = 2 * vision.block_parameters if precision == "amp" else 0
    return (kept.num_bytes - copies) / 1024


def test_an_analytic_profile_is_a_cost_profile() -> None:
    profile = _profile("internvl3-8b")
    assert parse_cost_profile(dump_cost_profile(profile), name="x") == profile


@pytest.mark.parametrize("model", shipped_names("model"))
def test_shipped_profiles_are_priced_as_the_formulas_do(model: str) -> None:
    """What they say of memory is of no recipe: plans without a profile of their own compute it for theirs."""
    found, shipped = _profile(model), shipped_profile(model)
    assert found.coefficients == shipped.coefficients
    assert found.bandwidth == shipped.bandwidth


@pytest.mark.hf
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("name", ["qwen3-tiny", "llama3.2-1b", "internvl3-2b"])
def test_activation_bytes_are_those_that_autograd_keeps(name: str, precision: str) -> None:
    kept = {layers: _kept_bytes_per_token(name, precision, layers) for layers in (1, 2)}
    spec = replace(load_model(name), vision=None, **_SMALL)
    assert kept[2] - kept[1] == layer_activation_bytes(spec, PRECISIONS[precision])


_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_size": 96,
    "vocab_size": 64,
}


def _kept_bytes_per_token(name: str, precision: str, layers: int, tokens: int = 128) -> float:
    """Bytes of distinct storages that autograd saved in a forward, parameters left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fcp_cli.runtime.integrations.transformers import prepare
    from fcp_cli.runtime.layout import shard_layout
    from fcp_cli.runtime.ring import Ring, current_ring

    spec = replace(load_model(name), num_layers=layers, **_SMALL)
    model_type, figures = text_config(spec)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config = AutoConfig.for_model(model_type, **figures)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    prepare(model)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "amp")
    current_ring.set(Ring(layout=shard_layout((tokens,), 1)))
    with _KeptStorages(model) as kept, autocast:
        model.model(input_ids=ids, position_ids=torch.arange(tokens)[None])
    current_ring.set(None)
    # Autocast keeps bf16 copies of the matrices besides; they do not grow with the tokens.
    copies = 2 * layers * spec.layer_matrix_parameters if precision == "amp" else 0
    return (kept.num_bytes - copies) / tokens


class _KeptStorages:
    """Counts the distinct storages that autograd saves, those of the model's parameters left out."""

    def __init__(self, model: Any) -> None:
        import torch

        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._kept: dict[int, Any] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Any) -> Any:
        if tensor.untyped_storage().data_ptr() not in self._own:
            self._kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def __enter__(self) -> _KeptStorages:
        self._hooks.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)


def test_the_token_budget_falls_with_the_state_and_the_activations() -> None:
    spec, recipe = load_model("qwen3-8b"), replace(ZERO_2, recompute="full")
    held = rank_memory(spec, recipe, sync="iteration", ranks=64)
    budget = _profile(recipe=recipe).memory.tokens_per_rank()
    assert budget is not None
    assert held.total_bytes(budget) <= 64e9 * 0.92 < held.total_bytes(budget + 1)
