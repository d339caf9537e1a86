"""Builds a small twin of a model whose weights are not loaded yet, for the probe."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor

_LAYERS = 6  # maximum of a twin; layer types alternate within fewer layers
_HEADS = 4
_GROUPS = 2
_SIZES = {
    "vocab_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def twin_of(model: transformers.PreTrainedModel) -> Any:
    """Return a small model of the same class on the CPU, or None if its class or config prevents it.

    It has the same layer types, experts, rotary embeddings and scales, but another width.
    """
    if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        return None  # under FakeTensorMode the twin would also be fake
    try:
        config = _small(model.config)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            twin: Any = type(model)(config)
        is_whole = all(bool(torch.isfinite(parameter).all()) for parameter in twin.parameters())
        return twin.float() if is_whole else None  # in fp32 even if the script's default dtype has 16 bits
    except Exception:  # any error of a model's own code at untested sizes
        return None


def _small(config: Any) -> Any:
    """Return a copy of a decoder's config with small sizes but the same head size."""
    small = copy.deepcopy(config)
    layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(small, name, value[:_LAYERS])
        elif name in _SIZES and isinstance(value, int):
            setattr(small, name, min(value, _SIZES[name]))
        elif name in _TOKENS and value is not None:
            setattr(small, name, _TOKENS.index(name))
    small.num_hidden_layers = min(layers, _LAYERS)
    groups = getattr(config, "num_key_value_heads", None)
    small.num_attention_heads = _HEADS
    if groups is not None:
        small.num_key_value_heads = _HEADS if groups == config.num_attention_heads else _GROUPS
    small.hidden_size = _HEADS * head_dim
    return small
