"""Build the model to train: unmodified transformers classes with the plan's attention, random weights."""

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
    """Return how many entries the model's vocabulary has."""
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
    """Build a model with random weights from `seed`, equal on all ranks, in float32; its forward takes `position_ids`.

    Args:
        name: a shipped model, a model YAML, or a Hugging Face config.json.
        seed: the seed of the initialisation, which torch's generator is set to.
        device: the device of the returned model.
        recompute: activations of each layer that backward recomputes.
        levels: the levels of the plan, if layers recompute as needed.
        freeze_vision: train the language model only; no effect on a model without an encoder.
        is_filled: False leaves the weights as they come, for `draw_weights` or a checkpoint to fill: on the host,
            memory that nothing has written to takes no room, so that a model that is sharded next never does.
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
    """Return the context of transformers in which models are built without filling their weights."""
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    module: Any = import_module("transformers.initialization" if major > 4 else "transformers.modeling_utils")
    context: AbstractContextManager[None] = module.no_init_weights()
    return context


def model_config(name: str) -> Any:
    """Return the transformers configuration: a config.json unchanged, or the figures of a description.

    Of a vision-language model that fcp cannot split into its parts, return only the language model.
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
    """Return a configuration with the numbers that are not finite: Mamba-2 bounds time steps by infinity."""
    if isinstance(value, dict):
        named = value.get("__float__")
        if named in ("Infinity", "-Infinity"):
            return float(named)
        return {key: _with_infinities(one) for key, one in value.items()}
    return [_with_infinities(one) for one in value] if isinstance(value, list) else value


def has_vision(config: Any) -> bool:
    """Return whether a transformers configuration is of a vision-language model."""
    return hasattr(config, "vision_config")


def shard_model(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None, keeps_weights: bool) -> None:
    """Shard weights, gradients and optimizer states with FSDP2, layer by layer, in place.

    Args:
        model: the model on any device, or on `meta`, whose shards are to be filled in afterwards.
        mesh: the mesh of all ranks, one dimension to shard over or two to copy and to shard over; each layer's shard
            moves to this rank's device of it.
        dtype: the type of the gathered weights and the matrix products, with shards and sums of gradients in the
            model's own; None computes in that, too.
        keeps_weights: gathered weights stay for the whole step instead of for one layer's forward or backward.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Summed in fp32: over many ranks bf16 would round small gradients away.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    if dtype is not None:
        for frozen in (parameter for parameter in model.parameters() if not parameter.requires_grad):
            frozen.data = frozen.data.to(dtype)  # nothing updates it, so that nothing needs it more precise
    # Layers first: the root gets the remaining parameters.
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_weights)
    fully_shard(model, mesh=mesh, mp_policy=policy)
