"""Field names and defaults of config.json by model type, for reading and writing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fcp_cli.models.figures import Architecture, Attention, Mlp

# Model type of a language model -> architecture with the same layers.
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "qwen3": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen2": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "llama": "llama",
    "mistral": "llama",
    "qwen3_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "gemma3_text": "gemma3_text",
    "gpt_oss": "gpt_oss",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm4_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "minimax_m2": "minimax_m2",
    "glm4_moe_lite": "glm4_moe_lite",
    "bamba": "bamba",
    "nemotron_h": "nemotron_h",
    "gemma4_text": "gemma4_text",
    "mimo_v2_flash": "mimo_v2_flash",
}

# Fields of a description -> config.json keys, which differ between families only for experts.
TEXT_NAMES: Final = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
_QWEN_EXPERTS: Final = {"count": "num_experts", "active": "num_experts_per_tok", "ffn_size": "moe_intermediate_size"}
_DEEPSEEK_EXPERTS: Final = {
    "count": "n_routed_experts",
    "active": "num_experts_per_tok",
    "ffn_size": "moe_intermediate_size",
    "dense_layers": "first_k_dense_replace",
}
# A dense MLP in parallel to the experts counts as a shared expert.
_GEMMA4_EXPERTS: Final = {
    "count": "num_experts",
    "active": "top_k_experts",
    "ffn_size": "moe_intermediate_size",
    "shared_ffn_size": "intermediate_size",
}
EXPERT_NAMES: Final[Mapping[Architecture, Mapping[str, str]]] = {
    "qwen3_moe": _QWEN_EXPERTS,
    "qwen3_next": {**_QWEN_EXPERTS, "shared_ffn_size": "shared_expert_intermediate_size"},
    "qwen3_5_moe": {**_QWEN_EXPERTS, "shared_ffn_size": "shared_expert_intermediate_size"},
    "minimax_m2": {"count": "num_local_experts", "active": "num_experts_per_tok", "ffn_size": "intermediate_size"},
    "gpt_oss": {"count": "num_local_experts", "active": "num_experts_per_tok", "ffn_size": "intermediate_size"},
    "deepseek_v3": _DEEPSEEK_EXPERTS,
    "glm4_moe": _DEEPSEEK_EXPERTS,
    "glm4_moe_lite": _DEEPSEEK_EXPERTS,
    "mimo_v2_flash": _DEEPSEEK_EXPERTS,
    "nemotron_h": {
        "count": "n_routed_experts",
        "active": "num_experts_per_tok",
        "ffn_size": "moe_intermediate_size",
        "shared_ffn_size": "moe_shared_expert_intermediate_size",
        "latent_size": "moe_latent_size",
    },
    "gemma4_text": _GEMMA4_EXPERTS,
    "gemma4": _GEMMA4_EXPERTS,
}
LATENT_NAMES: Final = {
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "rotary_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
}
LINEAR_NAMES: Final = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_size": "linear_key_head_dim",
    "value_size": "linear_value_head_dim",
    "kernel_size": "linear_conv_kernel_dim",
}
MAMBA_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "bamba": {
        "heads": "mamba_n_heads",
        "head_size": "mamba_d_head",
        "groups": "mamba_n_groups",
        "state_size": "mamba_d_state",
        "kernel_size": "mamba_d_conv",
        "chunk_size": "mamba_chunk_size",
    },
    "nemotron_h": {
        "heads": "mamba_num_heads",
        "head_size": "mamba_head_dim",
        "groups": "n_groups",
        "state_size": "ssm_state_size",
        "kernel_size": "conv_kernel",
        "chunk_size": "chunk_size",
    },
}
LAYER_TYPES: Final[Mapping[Attention, str]] = {
    "full": "full_attention",
    "window": "sliding_attention",
    "linear": "linear_attention",
}
MIXERS: Final[Mapping[str, tuple[Attention, Mlp]]] = {
    "linear_attention": ("mamba", "none"),
    "full_attention": ("full", "none"),
    "mlp": ("none", "dense"),
    "moe": ("none", "experts"),
}
"""Layers of families in which a layer has either a mixer or an MLP."""

OLDER_MIXERS: Final = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
# Known model types that cannot be described here.
UNDESCRIBED: Final[Mapping[str, str]] = {
    "minimax_m3_vl_text": "has experts in parallel to a dense MLP in some layers",
    "qwen3_omni_moe": "has an audio encoder besides the vision encoder (thinker_config), and a talker",
}
# Class defaults that published config.json files omit.
DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma3_text": {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "gpt_oss": {"attention_bias": True},
    "gemma4_text": {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
    "mimo_v2_flash": {
        "vocab_size": 152_576,
        "hidden_size": 4096,
        "intermediate_size": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_routed_experts": 256,
    },
    "nemotron_h": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
    },
}
# Supported values of settings that would otherwise change the parameter count.
ONLY: Final[Mapping[str, Mapping[str, Any]]] = {
    "nemotron_h": {"use_bias": False, "mlp_bias": False, "use_conv_bias": True},
}
UNTIED: Final = ("qwen2_5_vl_text", "bamba", *EXPERT_NAMES)  # unless the file says otherwise
WITH_HEAD_NORMS: Final = (
    "qwen3",
    "qwen3_vl_text",
    "qwen3_moe",
    "qwen3_vl_moe_text",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "minimax_m2",
    "gemma4_text",
)
