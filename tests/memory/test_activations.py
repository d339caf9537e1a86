"""Activations by the formulas against what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fcp_cli.cost.recipe import PrecisionName, Recipe, Recompute
from fcp_cli.memory.activations import layer_bytes, patch_bytes, recomputed_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.models.model import ModelSpec, VisionSpec, load_model
from fcp_cli.models.transformers_config import gemma4_config, text_config, whole_config
from fcp_cli.profiling.computed import MOVED_PER_RECOMPUTED_BYTE

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("name", ["qwen3-tiny", "llama3.2-1b", "internvl3-2b"])
def test_activation_bytes_are_those_that_autograd_keeps(name: str, precision: PrecisionName) -> None:
    kept = {layers: _kept_bytes_per_token(name, precision, layers) for layers in (1, 2)}
    spec = replace(load_model(name), vision=None, **_SMALL)
    (kind,) = spec.kinds
    assert kept[2] - kept[1] == layer_bytes(spec, kind, precision_of(Recipe(precision=precision)))


@pytest.mark.examples(2)
@pytest.mark.parametrize(("kind", "moved"), list(MOVED_PER_RECOMPUTED_BYTE.items()))
@pytest.mark.parametrize("name", ["qwen3-8b", "llama3-8b", "gemma3-27b"])
def test_recomputed_operations_move_the_bytes_that_are_priced(name: str, kind: Recompute, moved: float) -> None:
    import torch
    from torch.utils._pytree import tree_leaves

    from fcp_cli.runtime import recompute as module

    handing_out, found = module._HandingOutProducts.__torch_dispatch__, 0

    def counted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal found
        out = handing_out(self, func, types, args, kwargs)
        if func not in module._PRODUCTS and func.overloadpacket.__name__ not in _VIEWS:
            tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
            found += sum(one.numel() * one.element_size() for one in tensors)
        return out

    tokens, small = 512, {**_SMALL, "hidden_size": 512, "num_heads": 8, "head_dim": 64, "ffn_size": 1536}
    spec = replace(load_model(name), vision=None, num_layers=1, **small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._HandingOutProducts, "__torch_dispatch__", counted)
        _run_layers(spec, kind, tokens)
    (layer,), recipe = spec.kinds, Recipe(recompute=kind)
    assert found / tokens / recomputed_bytes(spec, layer, recipe, precision_of(recipe)) == pytest.approx(moved, rel=0.2)


_VIEWS = ("view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "unsqueeze", "detach", "alias")


def _run_layers(spec: ModelSpec, kind: Recompute, tokens: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fcp_cli.integrations.transformers import prepare, recompute_layers
    from fcp_cli.runtime.layout import shard_layout
    from fcp_cli.runtime.ring import Ring, current_ring

    model_type, figures = text_config(spec)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(model_type, **figures), dtype=torch.bfloat16
    )
    prepare(model)
    recompute_layers(model.train(), kind)
    current_ring.set(Ring(layout=shard_layout((tokens,), 1)))
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    hidden = model.model(input_ids=ids, position_ids=torch.arange(tokens)[None]).last_hidden_state
    hidden.float().sum().backward()
    current_ring.set(None)


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

    from fcp_cli.integrations.transformers import prepare
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
    copies = 2 * (spec.matrix_parameters - spec.embedding_parameters) if precision == "amp" else 0
    return (kept.num_bytes - copies) / tokens


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen2.5-vl-7b", "internvl3-8b", "gemma3-vl-27b"])
def test_encoder_activations_are_those_that_autograd_keeps(name: str, precision: PrecisionName) -> None:
    vision = load_model(name).vision
    assert vision is not None
    # As large as the pictures below, where an encoder takes one size alone.
    image_size = vision.image_size and 448
    small = replace(vision, hidden_size=64, ffn_size=96, num_heads=4, deepstack_layers=(), image_size=image_size)
    one, two = (_kept_bytes_per_patch(name, replace(small, depth=depth), precision) for depth in (1, 2))
    # A class token among 1,024 patches, and autocast's copies of biases, do not grow with them.
    assert two - one == pytest.approx(patch_bytes(small, precision_of(Recipe(precision=precision))), rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
def test_the_encoder_of_gemma4_keeps_and_computes_what_is_counted(precision: PrecisionName) -> None:
    one, two = (_bytes_and_operations_of_gemma4(depth, precision) for depth in (1, 2))
    vision = _gemma4_tower(1)
    assert two[0] - one[0] == pytest.approx(patch_bytes(vision, precision_of(Recipe(precision=precision))), rel=2e-3)
    of_block = 2 * vision.block_parameters
    assert two[1] - one[1] == of_block  # attention's pairs are not counted on CPUs


def _gemma4_tower(depth: int) -> VisionSpec:
    return VisionSpec(
        kind="gemma4", depth=depth, hidden_size=64, num_heads=4, ffn_size=96, patch_size=16, temporal_patch_size=1,
        merge_size=3, out_hidden_size=64, axis_positions=100,
    )  # fmt: skip


def _bytes_and_operations_of_gemma4(depth: int, precision: str) -> tuple[float, float]:
    """Bytes that autograd saved, and operations of matrices, of an encoder's forward, per patch."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModel

    small: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "vocab_size": 8,
        "vocab_size_per_layer_input": 8,
    }
    config = AutoConfig.for_model("gemma4", text_config=small, **gemma4_config(_gemma4_tower(depth))).vision_config
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    encoder = AutoModel.from_config(config).to(dtype)  # type: ignore[no-untyped-call]
    side = torch.arange(36)
    places = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).reshape(1, -1, 2)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "amp")
    with _KeptStorages(encoder) as kept, FlopCounterMode(display=False) as counter, autocast:
        encoder(torch.zeros(1, len(side) ** 2, 3 * 16**2, dtype=dtype), places)
    copies = 2 * _gemma4_tower(depth).block_parameters if precision == "amp" else 0
    return (kept.num_bytes - copies) / len(side) ** 2, counter.get_total_flops() / len(side) ** 2


def _kept_bytes_per_patch(name: str, vision: VisionSpec, precision: str) -> float:
    """Bytes of distinct storages that autograd saved in an encoder's forward, parameters left out."""
    import torch
    from transformers import AutoConfig, AutoModel

    model_type, figures = whole_config(replace(load_model(name), vision=vision, num_layers=1))
    config = AutoConfig.for_model(model_type, **figures).vision_config
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    encoder = AutoModel.from_config(config).to(dtype)  # type: ignore[no-untyped-call]
    if vision.kind not in ("internvit", "siglip"):
        pixels = torch.zeros(1024, 3 * 2 * vision.patch_size**2)
        arguments = {"grid_thw": torch.tensor([[1, 32, 32]])}
    else:
        pixels, arguments = torch.zeros(1, 3, 448, 448), {}
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "amp")
    with _KeptStorages(encoder) as kept, autocast:
        encoder(pixels.to(dtype), **arguments)
    copies = 2 * vision.block_parameters if precision == "amp" else 0
    return (kept.num_bytes - copies) / 1024


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
