"""Tiny decoders of Hugging Face's families, made by hand, and what becomes of each under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from tests.runtime.models import SMALL_DECODER

SIZES: Mapping[str, Any] = {
    "vocab_size": 61,
    **SMALL_DECODER,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_FULL = {"layer_types": ["full_attention"] * 2}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
LATENT_SIZES = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
_INDEXED = {**LATENT_SIZES, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
# Heads of two sizes: those of layers without windows are larger.
_GEMMA4 = {**_WINDOWS, "global_head_dim": 16, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
_GEMMA4_SHARED = {
    **_GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 61,
}
_LONGCAT = {**LATENT_SIZES, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 0}
_GROUPS = {"n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2}
_LLAMA4 = {**_FULL, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A family, or a variant of one.

    Attributes:
        kind: its `model_type`.
        settings: of its config, on top of tiny sizes.
        without: tiny sizes that its config does not take.
        refused: part of what is said of it; None: it is trained as one process trains it.
        tolerance: on gradients of about 0.1, where its code computes some of it in fp32.
    """

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    refused: str | None = None
    tolerance: float = 1e-12

    def build(self) -> Any:
        """Make the model in fp64; equal weights at every call."""
        sizes = {name: value for name, value in SIZES.items() if name not in self.without}
        config = transformers.AutoConfig.for_model(self.kind, **{**sizes, **self.settings})
        torch.manual_seed(0)
        # Experts as a loop over them: the grouped products of CPUs know no fp64.
        kind: Any = transformers.AutoModelForCausalLM
        made = kind.from_config(config, experts_implementation="eager")
        return made.double().eval()


_TRAINED = [
    "apertus",
    "arcee",
    "biogpt",
    "bitnet",
    "ernie4_5",
    "flex_olmo",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "internlm3",
    "jetmoe",
    "lfm2",
    "llama",
    "ministral3",
    "nanochat",
    "olmo",
    "olmo2",
    "olmoe",
    "persimmon",
    "phi",
    "qwen3_moe",
    "opt",
    "seed_oss",
]
_TRAINED_WITHOUT_WINDOW = [
    "mistral",
    "mixtral",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "smollm3",
    "starcoder2",
]
_TRAINED_FULL = ["cohere2", "exaone4", "olmo3"]
_IN_FP32 = ["cohere", "ernie4_5_moe", "gemma", "glm4_moe", "helium", "minimax_m2"]  # rotations, norms or routers

FAMILIES: Mapping[str, Family] = {
    **{kind: Family(kind=kind) for kind in _TRAINED},
    **{kind: Family(kind=kind, settings=_NO_WINDOW) for kind in _TRAINED_WITHOUT_WINDOW},
    **{kind: Family(kind=kind, settings=_FULL) for kind in _TRAINED_FULL},
    **{kind: Family(kind=kind, tolerance=1e-8) for kind in _IN_FP32},
    "codegen": Family(kind="codegen", settings={"rotary_dim": 8}),
    "gptj": Family(kind="gptj", settings={"rotary_dim": 8}),
    "falcon": Family(kind="falcon", without=("head_dim",), refused="interface"),
    "deepseek_v2": Family(
        kind="deepseek_v2",
        settings=LATENT_SIZES,
        tolerance=1e-8,
    ),
    "deepseek_v3": Family(
        kind="deepseek_v3",
        settings={**LATENT_SIZES, **_GROUPS, "first_k_dense_replace": 1},
        tolerance=1e-8,
    ),
    "deepseek_v3, dense": Family(kind="deepseek_v3", settings={**LATENT_SIZES, "first_k_dense_replace": 2}),
    "glm4_moe_lite": Family(kind="glm4_moe_lite", settings=LATENT_SIZES, tolerance=1e-8),
    "longcat_flash": Family(kind="longcat_flash", settings=_LONGCAT, tolerance=1e-8),
    "minicpm3": Family(kind="minicpm3", settings=LATENT_SIZES),
    "youtu": Family(kind="youtu", settings=LATENT_SIZES),
    "deepseek_v32": Family(kind="deepseek_v32", settings=LATENT_SIZES, refused="attends to the tokens that an indexer selects"),
    "cohere2": Family(kind="cohere2", settings=_FULL, tolerance=1e-8),
    "gemma3_text": Family(kind="gemma3_text", settings=_FULL, tolerance=1e-8),
    "gemma4_text": Family(kind="gemma4_text", settings=_GEMMA4, tolerance=1e-7),
    "gemma4_text, heads of 512": Family(
        kind="gemma4_text", settings={**_GEMMA4, "global_head_dim": 512, "attention_k_eq_v": True}, tolerance=1e-7
    ),
    "gemma4_text, shared keys and values": Family(kind="gemma4_text", settings=_GEMMA4_SHARED, tolerance=1e-7),
    "gemma4_text, experts": Family(
        kind="gemma4_text", settings={**_GEMMA4, "enable_moe_block": True, "top_k_experts": 2}, tolerance=1e-7
    ),
    "mimo_v2_flash": Family(kind="mimo_v2_flash", tolerance=1e-8),
    "minimax_m3_vl_text": Family(kind="minimax_m3_vl_text", tolerance=1e-8),
    "glm_moe_dsa": Family(kind="glm_moe_dsa", settings=_INDEXED, refused="tokens that an indexer selects"),
    "minimax_m3_vl_text, sparse": Family(
        kind="minimax_m3_vl_text",
        settings={"layer_types": ["minimax_m3_sparse", "full_attention"]},
        refused="tokens that an indexer selects",
    ),
    "deepseek_v4": Family(kind="deepseek_v4", refused="tokens that an indexer selects"),
    "kimi_linear": Family(kind="kimi_linear", settings=LATENT_SIZES, refused="decays per channel"),
    "bailing_hybrid": Family(kind="bailing_hybrid", refused="lightning attention"),
    "lfm3": Family(kind="lfm3", refused="short convolutions"),
    "gemma2": Family(kind="gemma2", settings={**_WINDOWS, "attn_logit_softcapping": 2.0}, tolerance=1e-7),
    "gpt_oss": Family(kind="gpt_oss", settings=_WINDOWS),
    "doge": Family(kind="doge", refused="an attention mask"),
    "vaultgemma": Family(kind="vaultgemma", settings={**_FULL, "attn_logit_softcapping": 2.0}, tolerance=1e-7),
    # Positions
    "llama4_text": Family(kind="llama4_text", settings={**_LLAMA4, "attn_temperature_tuning": False}),
    "llama4_text, tuned": Family(
        kind="llama4_text",
        settings={**_LLAMA4, "attn_temperature_tuning": True},
        refused="scales its queries by positions that it counts itself, .*; set attn_temperature_tuning to False",
    ),
    "llama, yarn": Family(
        kind="llama",
        settings={"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}},
    ),
    "llama, dynamic": Family(
        kind="llama",
        settings={"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
        refused="its config asks for rope_type dynamic",
    ),
    "phi3, longrope": Family(
        kind="phi3",
        settings={
            **_NO_WINDOW,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128,
                "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0] * 4,
            },
        },
        refused="its config asks for rope_type longrope",
    ),
    "bloom": Family(kind="bloom", refused="takes no position_ids"),
    "mpt": Family(kind="mpt", refused="takes no position_ids"),
    "rwkv": Family(kind="rwkv", refused="takes no position_ids"),
    "xlstm": Family(kind="xlstm", refused="takes no position_ids"),
    # Attention that no ring can take the place of
    "gpt_neo": Family(
        kind="gpt_neo", settings={"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, refused="interface"
    ),
    "openai-gpt": Family(kind="openai-gpt", refused="interface"),
    "ctrl": Family(kind="ctrl"),
    "nemotron": Family(kind="nemotron", refused="does not hand keyword arguments down"),
    "stablelm": Family(kind="stablelm", refused="does not hand keyword arguments down"),
    # Windows
    "cwm": Family(kind="cwm", settings=_WINDOWS),
    "ministral": Family(kind="ministral", settings=_WINDOWS),
    "afmoe": Family(kind="afmoe", settings=_WINDOWS),
    "gemma3_text, windows": Family(kind="gemma3_text", settings=_WINDOWS, tolerance=1e-8),
    "mistral, windows": Family(kind="mistral", settings={"sliding_window": 7}),
    "qwen2, windows": Family(kind="qwen2", settings={**_WINDOWS, "use_sliding_window": True}),
    "qwen3, windows": Family(kind="qwen3", settings={**_WINDOWS, "use_sliding_window": True}),
    "olmo3, windows": Family(kind="olmo3", settings=_WINDOWS),
    "phi3, windows": Family(kind="phi3", settings={"sliding_window": 7}),
    "cohere2, windows": Family(kind="cohere2", settings=_WINDOWS, tolerance=1e-8),
    "smollm3, windows": Family(kind="smollm3", settings={**_WINDOWS, "use_sliding_window": True}),
    "starcoder2, windows": Family(kind="starcoder2", settings={"sliding_window": 7}),
    "mixtral, windows": Family(kind="mixtral", settings={"sliding_window": 7}),
}  # fmt: skip

HYBRIDS: Mapping[str, Family] = {
    "jamba": Family(kind="jamba", settings={"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}),
    "lfm2": Family(kind="lfm2", settings={"layer_types": ["conv", "full_attention"]}),
    "minimax": Family(kind="minimax"),
    "recurrent_gemma": Family(kind="recurrent_gemma", settings={"block_types": ["recurrent", "attention"]}),
}
STATE_SPACES: Mapping[str, Family] = {
    "mamba": Family(kind="mamba"),
    "mamba2": Family(kind="mamba2", settings={"num_heads": 4, "head_dim": 16, "n_groups": 1}),
    "falcon_mamba": Family(kind="falcon_mamba"),
}
