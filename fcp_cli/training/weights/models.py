"""Builds the model to train: unmodified transformers classes with the plan's attention and random weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fcp_cli.cost.recompute_levels import RecomputeLevel
from fcp_cli.models.configurations.hf_config import read_configuration
from fcp_cli.models.model import load_model
from fcp_cli.models.transformers_config import whole_config
from fcp_cli.recipe import Recompute
from fcp_cli.runtime.injection.integrations import transformers_models
from fcp_cli.training.weights.initial import draw_weights
from fcp_cli.vision.families import FAMILIES


def model_vocab_size(name: str) -> int:
    """Return the size of the model's vocabulary."""
    return load_model(name).vocab_size


def build_model(
    name: str,
    *,
    seed: int,
    device: torch.device,
    recompute: Recompute = "none",
    levels: Sequence[RecomputeLevel] = (),
    freeze_vision: bool = False,
    is_filled: bool = True,
) -> Any:
    """Build a float32 model with random weights, equal on all ranks; its forward takes `position_ids`.

    Args:
        name: a shipped model, a model YAML, or a Hugging Face config.json.
        seed: seed of the initialization, for torch's generator.
        device: device of the returned model.
        recompute: activation recomputation of layers.
        levels: recompute levels of the plan, for as-needed recomputation.
        freeze_vision: train only the language model; no effect without an encoder.
        is_filled: False leaves weights uninitialized, to be filled by `draw_weights` or a checkpoint: untouched host
            memory is never allocated, so a model that is sharded next takes none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    integration = transformers_models()
    config = model_config(name)
    family = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    with _no_init_weights():
        model: Any = family.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.tie_weights()
    if is_filled:
        draw_weights(model, seed)
    with nullcontext() if is_filled else integration.weights_to_come():
        integration.prepare(model)
    if freeze_vision and has_vision(config):
        model.base_model.requires_grad_(False)
        model.base_model.language_model.requires_grad_(True)
    integration.recompute_layers(model, recompute, levels)
    model.to(device).train()
    return model


def _no_init_weights() -> AbstractContextManager[None]:
    """Return transformers' context for building models without initializing weights."""
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    module: Any = import_module("transformers.initialization" if major > 4 else "transformers.modeling_utils")
    context: AbstractContextManager[None] = module.no_init_weights()
    return context


def model_config(name: str) -> Any:
    """Return the transformers configuration of a config.json or a model description.

    For an unsupported vision-language model, it is that of the language model.
    """
    from transformers import AutoConfig

    spec = load_model(name)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        document = _with_infinities(read_configuration(path))
        if document.get("model_type") not in FAMILIES:
            document = document.get("text_config") or document.get("llm_config") or document
        model_type, arguments = document.pop("model_type"), document
        backbones = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_5_vl_text": "qwen2"}
        model_type = backbones.get(model_type, model_type)
    else:
        model_type, arguments = whole_config(spec)
    config = AutoConfig.for_model(model_type, **arguments)
    config.get_text_config().use_cache = False
    return config


def _with_infinities(value: Any) -> Any:
    """Restore infinities in a configuration: Mamba-2 bounds time steps by infinity."""
    if isinstance(value, dict):
        named = value.get("__float__")
        if named in ("Infinity", "-Infinity"):
            return float(named)
        return {key: _with_infinities(one) for key, one in value.items()}
    return [_with_infinities(one) for one in value] if isinstance(value, list) else value


def has_vision(config: Any) -> bool:
    """Return whether a transformers configuration belongs to a vision-language model."""
    return hasattr(config, "vision_config")


def shard_model(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None, keeps_weights: bool) -> None:
    """Shard weights, gradients and optimizer states with FSDP2, layer by layer, in place.

    Args:
        model: model on any device, or on `meta` to fill the shards later.
        mesh: device mesh of all ranks: one dimension to shard, or two to replicate and shard; shards move to the
            device.
        dtype: dtype of gathered weights and matrix products; shards and reduced gradients keep the model's. None: the
            model's dtype.
        keeps_weights: keep gathered weights for the entire step instead of resharding after each layer.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Reduced in fp32: over many ranks, bf16 would round small gradients away.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    if dtype is not None:
        for frozen in (parameter for parameter in model.parameters() if not parameter.requires_grad):
            frozen.data = frozen.data.to(dtype)  # never updated, so it needs no higher precision
    # Layers first; the root gets the remaining parameters.
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_weights)
    fully_shard(model, mesh=mesh, mp_policy=policy)
