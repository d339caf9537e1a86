"""Builds the model to train: unmodified transformers classes with the plan's attention, random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fcp_cli.profiling.models import ModelSpec, load_model


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltModel:
    """A model and what a person wants to know about it.

    Attributes:
        model: on the device; its `forward` takes input_ids and position_ids.
        parameters: how many there are, a tied one once.
        dropped: parts of the described model that are not trained here, for a note; else "".
    """

    model: nn.Module
    parameters: int
    dropped: str = ""


def model_vocab_size(name: str) -> int:
    """Entries of the model's vocabulary.

    Raises:
        ProfileError: there is no such model.
    """
    return load_model(name).vocab_size


def build_model(name: str, *, seed: int, device: torch.device, recompute: bool = False) -> BuiltModel:
    """Random weights from `seed`, equal on all ranks, in float32.

    Args:
        name: a shipped model, a model YAML, or a Hugging Face config.json.
        seed: of the initialisation; torch's generator is left seeded with it.
        device: where the model ends up.
        recompute: drop the activations of each layer in forward and compute them again in backward.

    Raises:
        ProfileError: there is no such model.
        RunError: its attention is not plain causal attention.
    """
    from transformers import AutoModelForCausalLM

    from fcp_cli.runtime.integrations.transformers import prepare

    spec = load_model(name)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(name, spec), dtype=torch.float32)  # type: ignore[no-untyped-call]
    prepare(model)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(device).train()
    return BuiltModel(
        model=model,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dropped="its vision encoder" if spec.vision is not None else "",
    )


def _config(name: str, spec: ModelSpec) -> Any:
    """The transformers configuration: a config.json as it stands, or the figures of a description."""
    from transformers import AutoConfig

    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        document = json.loads(path.read_text(encoding="utf-8"))
        document = document.get("text_config") or document.get("llm_config") or document
        model_type, arguments = document.pop("model_type"), document
        model_type = {"qwen3_vl_text": "qwen3"}.get(model_type, model_type)
    else:
        model_type, arguments = spec.text_config()
    return AutoConfig.for_model(model_type, **{**arguments, "use_cache": False})


def shard_model(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Shard weights, gradients and optimizer states over all ranks (FSDP2), layer by layer, in place."""
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
