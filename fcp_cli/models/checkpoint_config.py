"""Model descriptions read from a Hugging Face config.json: field names, class defaults and what is supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import ProfileError
from fcp_cli.models.layers import MOST_LAYERS, Architecture, Attention, Mlp
from fcp_cli.models.ring_exactness import growing_rotation, missing_for_rings
from fcp_cli.models.vision_config import VisionFamily, family_of, vision_figures
from fcp_cli.util.inputs import kind_of, read_json
from fcp_cli.util.validation import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class HfConfig:
    """Model described by a config.json.

    Attributes:
        architecture: see `ModelSpec`.
        figures: unvalidated fields of `TextFigures`; those absent from the file are missing.
        vision: unvalidated fields of `VisionSpec`, or None without an encoder.
    """

    name: str
    architecture: Architecture
    figures: Mapping[str, Any]
    vision: Mapping[str, Any] | None


def read_configuration(path: Path) -> dict[str, Any]:
    """Parse a config.json, with non-finite numbers in the form of transformers 5.

    Raises:
        ProfileError: the file is unreadable or not a JSON object.
    """
    label = "the model configuration "
    document = read_json(path, error=ProfileError, label=label, constant=lambda name: {"__float__": name})
    if not isinstance(document, dict):
        raise ProfileError(f"{path} is not a model configuration: expected a JSON object")
    return document


def read_hf_config(path: Path) -> HfConfig:
    """Read a config.json: the language model, and the vision encoder if any.

    Raises:
        ProfileError: the file is unreadable, or the architecture or its encoder is not supported.
    """
    document = read_configuration(path)
    family = family_of(document, where=path)
    whole = _text_block(document, family, path)
    model_type = whole["model_type"]
    if model_type not in ARCHITECTURES:
        missing = missing_for_rings(model_type)
        if missing is not None:
            raise ProfileError(f"{path}: model_type is {model_type!r}, which {missing}; it cannot follow a plan")
        if model_type in UNDESCRIBED:
            raise ProfileError(
                f"{path}: model_type is {model_type!r}, which {UNDESCRIBED[model_type]}: fcp does not describe it; "
                "give a profile of such a model with --profile"
            )
        raise ProfileError(f"{path}: model_type is {model_type!r}; known: {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    figures = _text_figures(whole, architecture, where=str(path))
    named = document.get("_name_or_path")
    return HfConfig(
        name=Path((isinstance(named, str) and named) or path.resolve().parent.name).name or path.stem,
        architecture=architecture if family is None else family.architecture,
        figures={key: value for key, value in figures.items() if value is not None},
        vision=None if family is None else vision_figures(document, family, where=path),
    )


def _text_block(document: Mapping[str, Any], family: VisionFamily | None, path: Path) -> dict[str, Any]:
    """Return the language model's block, including class defaults and its model type."""
    text = _block(document, "text_config", path) or _block(document, "llm_config", path) or document
    named = text.get("model_type")
    if family is not None and (named is None or text is document):
        named = family.text_types[0]
    model_type = str(named or document.get("model_type"))
    if family is not None and model_type not in family.text_types:
        raise ProfileError(
            f"{path}: text_config.model_type is {model_type!r}; known for {document['model_type']}: "
            f"{', '.join(family.text_types)}"
        )
    whole = {**DEFAULTS.get(model_type, {}), **text, "model_type": model_type}
    if family is not None and family.is_tied is not None:  # transformers ignores the language model's own setting
        whole["tie_word_embeddings"] = document.get("tie_word_embeddings", family.is_tied)
    whole.setdefault("tie_word_embeddings", document.get("tie_word_embeddings", model_type not in UNTIED))
    return whole


def _block(document: Mapping[str, Any], key: str, path: Path | str) -> dict[str, Any]:
    """Return a block of a configuration; {} if absent."""
    block = document.get(key) or {}
    if not isinstance(block, dict):
        raise ProfileError(f"{path}: {key} is {kind_of(block)}; it must be a mapping")
    return block


def _text_figures(text: Mapping[str, Any], architecture: Architecture, *, where: str) -> dict[str, Any]:
    model_type = text["model_type"]
    rope = _block(text, "rope_parameters", where)
    growing = growing_rotation(rope, text.get("rope_scaling"))
    if growing is not None:
        raise ProfileError(
            f"{where}: its rope_type {growing} depends on the longest position on a rank, so it cannot follow a plan; "
            "choose another, such as yarn"
        )
    for key, only in ONLY.get(model_type, {}).items():
        if text.get(key, only) != only:
            raise ProfileError(f"{where}: {key} is {shown(text[key])}; only {only} is supported for {model_type}")
    found = {figure: text.get(name) for figure, name in TEXT_NAMES.items()}
    mixers = _mixers(text, where=where) if architecture == "nemotron_h" else None
    kinds = [attention for attention, _ in mixers] if mixers else _attention(text, architecture, where=where)
    experts = _experts(text, architecture, where=where)
    if mixers is not None:
        mlps = [mlp for _, mlp in mixers]
        found |= {"num_layers": len(mixers), "mlp": mlps}
        experts = experts if "experts" in mlps else None
    has_dense = mixers is not None and ("none", "dense") in mixers
    if experts is not None and not experts.get("dense_layers") and not has_dense:
        found["ffn_size"] = None  # unused by any layer
    of_family: dict[str, Any] = {}
    if architecture == "gemma4_text":
        of_family = _gemma4_figures(text, kinds)
    elif architecture == "mimo_v2_flash":
        of_family = _mimo_figures(text)
    figures = found | {
        "num_kv_heads": text.get("num_key_value_heads", text.get("num_attention_heads")),
        "head_dim": _head_dim(text, where=where),
        "qkv_bias": bool(text.get("attention_bias", False)) or ARCHITECTURES[model_type] == "qwen2",
        "qk_norm": model_type in WITH_HEAD_NORMS or bool(text.get("use_qk_norm", False)),
        "rope_theta": text.get("rope_theta") or rope.get("rope_theta") or 10_000.0,
        "norm_eps": text.get("rms_norm_eps") or text.get("layer_norm_epsilon") or 1e-6,
        "attention": None if set(kinds) == {"full"} else kinds,
        "window_tokens": text.get("sliding_window") if "window" in kinds else None,
        "experts": experts,
        "latent": _named_figures(text, LATENT_NAMES) if "latent" in kinds else None,
        "linear": _named_figures(text, LINEAR_NAMES) if "linear" in kinds else None,
        "mamba": _named_figures(text, MAMBA_NAMES[architecture]) if "mamba" in kinds else None,
    }
    return figures | of_family


def _mixers(text: Mapping[str, Any], *, where: str) -> list[tuple[Attention, Mlp]]:
    """Return (attention, MLP) of each layer, of which one is `none`."""
    key = next((key for key in ("layers_block_type", "layer_types", "hybrid_override_pattern") if text.get(key)), None)
    named = text[key] if key is not None else []
    if not isinstance(named, (list, str)) or not 0 < len(named) <= MOST_LAYERS:
        raise ProfileError(f"{where}: {key or 'layers_block_type'} is {shown(named)}; it must name the layers")
    found = [OLDER_MIXERS.get(name, name) if isinstance(name, str) else name for name in named]
    unknown = [name for name in found if not isinstance(name, str) or name not in MIXERS]
    if unknown:
        raise ProfileError(f"{where}: {key} has {shown(unknown[0])}; known: {', '.join(MIXERS)}")
    return [MIXERS[name] for name in found]


def _gemma4_figures(text: Mapping[str, Any], kinds: list[Attention]) -> dict[str, Any]:
    """Return fields specific to Gemma 4: full layers, layers that reuse keys and values, per-layer inputs."""
    overrides = text.get("per_layer_config")  # as transformers 5 saves them
    of_full = {"head_dim": text["global_head_dim"], "num_key_value_heads": text.get("num_global_key_value_heads")}
    if isinstance(overrides, dict) and overrides:
        of_full |= next(iter(overrides.values()))
    keys_as_values = bool(text.get("attention_k_eq_v"))
    heads = of_full["num_key_value_heads"] if keys_as_values else None
    found: dict[str, Any] = {
        "full_heads": {
            "num_kv_heads": heads or text["num_key_value_heads"],
            "head_dim": of_full["head_dim"],
            "keys_as_values": keys_as_values,
        }
    }
    if text.get("num_kv_shared_layers"):
        width = text["intermediate_size"]
        is_double = text.get("use_double_wide_mlp") and isinstance(width, int)
        found["reused"] = {"layers": text["num_kv_shared_layers"], "ffn_size": 2 * width if is_double else width}
    if text["hidden_size_per_layer_input"]:
        found["layer_inputs"] = {
            "size": text["hidden_size_per_layer_input"],
            "vocab_size": text["vocab_size_per_layer_input"],
        }
    return found


def _mimo_figures(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields specific to MiMo-V2-Flash: head counts and window size; window layers have twice the KV heads."""
    heads, before = text["num_key_value_heads"], text.get("sliding_window_size")  # excludes the token itself
    found = {
        "num_kv_heads": 2 * heads if isinstance(heads, int) else heads,
        "full_heads": {"num_kv_heads": heads, "head_dim": text["head_dim"]},
        "value_head_dim": text["v_head_dim"],
    }
    return found | ({"window_tokens": before + 1} if isinstance(before, int) else {})


def _named_figures(text: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {figure: text[name] for figure, name in names.items() if text.get(name) is not None}


def _head_dim(text: Mapping[str, Any], *, where: str) -> Any:
    """Return head_dim; latent attention composes it of two parts."""
    parts = [text.get("qk_nope_head_dim"), text.get("qk_rope_head_dim")]
    if all(isinstance(part, int) for part in parts):
        return sum(part for part in parts if isinstance(part, int))
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    given = text.get("head_dim")
    if given is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        if hidden % heads:
            raise ProfileError(
                f"{where}: head_dim is missing and hidden_size {hidden} is not divisible by num_attention_heads {heads}"
            )
        return hidden // heads
    return given


def _experts(text: Mapping[str, Any], architecture: Architecture, *, where: str) -> dict[str, Any] | None:
    names = EXPERT_NAMES.get(architecture)
    if names is None or text.get("enable_moe_block", architecture != "gemma4_text") is False:
        return None
    others = [("mlp_only_layers", []), ("decoder_sparse_step", 1)]
    for key, usual in others:
        if text.get(key, usual) not in (None, usual):
            raise ProfileError(
                f"{where}: {key} is {text[key]!r}; only models with experts in all layers but the first are supported"
            )
    # transformers 5 renames these for some families.
    count = text.get(names["count"], text.get("num_local_experts"))
    found = _named_figures({**text, names["count"]: count}, names)
    kinds = text.get("mlp_layer_types")  # as transformers 5 saves the first dense layers of some families
    if "dense_layers" in names and "dense_layers" not in found and isinstance(kinds, list):
        found["dense_layers"] = next((layer for layer, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    elif architecture == "mimo_v2_flash":
        found.setdefault("dense_layers", 1)
    shared, width = text.get("n_shared_experts"), found.get("ffn_size")
    if isinstance(shared, int) and isinstance(width, int) and "shared_ffn_size" not in names:
        found["shared_ffn_size"] = shared * width
    return found


def _attention(text: Mapping[str, Any], architecture: Architecture, *, where: str) -> list[Attention]:
    """Return the attention kind of each layer, or one repeating period of kinds."""
    if architecture in ("deepseek_v3", "glm4_moe_lite"):
        return ["latent"]
    if architecture == "bamba":
        full, layers = text.get("attn_layer_indices") or [], text.get("num_hidden_layers")
        if not isinstance(full, list):
            raise ProfileError(f"{where}: attn_layer_indices is {shown(full)}; it must be a list of layers")
        if not isinstance(layers, int) or layers < 1:
            return ["full"]  # an invalid number of layers is rejected later
        indices = {index for index in full if isinstance(index, int)}
        return ["full" if layer in indices else "mamba" for layer in range(min(layers, MOST_LAYERS))]
    types = text.get("layer_types")
    if isinstance(types, list) and types:
        by_name = {name: kind for kind, name in LAYER_TYPES.items()}
        unknown = [name for name in types if not isinstance(name, str) or name not in by_name]
        if unknown:
            raise ProfileError(f"{where}: layer_types has {shown(unknown[0])}; known: {', '.join(by_name)}")
        return [by_name[name] for name in types]
    if architecture == "gpt_oss":
        return ["window", "full"]
    if architecture in ("gemma3_text", "gemma4_text"):
        return [*_repeated("window", text.get("sliding_window_pattern", 6)), "full"]
    if architecture == "mimo_v2_flash":
        layers = text.get("num_hidden_layers")
        count = min(layers, MOST_LAYERS) if isinstance(layers, int) else 0
        return ["full" if layer == 0 or (layer + 1) % 6 == 0 else "window" for layer in range(count)] or ["full"]
    if architecture in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        return [*_repeated("linear", text.get("full_attention_interval", 4)), "full"]
    if not text.get("sliding_window") or not text.get("use_sliding_window", text["model_type"] == "mistral"):
        return ["full"]
    first, layers = text.get("max_window_layers", 0), text.get("num_hidden_layers")
    if not isinstance(first, int) or not isinstance(layers, int):
        return ["window"]
    return ["full" if layer < first else "window" for layer in range(min(layers, MOST_LAYERS))]


def _repeated(kind: Attention, period: Any) -> list[Attention]:
    return [kind] * (period - 1) if isinstance(period, int) and 0 < period <= MOST_LAYERS else []


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
