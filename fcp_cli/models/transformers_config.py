"""Converts model descriptions to configuration arguments of Hugging Face transformers."""

from __future__ import annotations

from typing import Any, Final

from fcp_cli.models.checkpoint_config import (
    EXPERT_NAMES,
    LATENT_NAMES,
    LAYER_TYPES,
    LINEAR_NAMES,
    MAMBA_NAMES,
    MIXERS,
    TEXT_NAMES,
)
from fcp_cli.models.layers import Experts
from fcp_cli.models.model import ModelSpec, VisionSpec

_BACKBONES: Final = {
    "qwen3_vl": "qwen3",
    "qwen2_5_vl": "qwen2",
    "internvl": "qwen2",
    "qwen3_vl_moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}


def text_config(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return (model type, configuration arguments) of the language model in transformers.

    For vision-language models this is the language backbone: Qwen3 for Qwen3-VL, Qwen2 for Qwen2.5-VL, either for
    InternVL.
    """
    model_type = _BACKBONES.get(spec.architecture, spec.architecture)
    if spec.architecture == "internvl" and spec.qk_norm:
        model_type = "qwen3" if spec.experts is None else "qwen3_moe"  # InternVL3.5
    given = ((name, getattr(spec, figure)) for figure, name in TEXT_NAMES.items())
    arguments = {name: value for name, value in given if value is not None}
    if spec.experts is not None:
        arguments |= _expert_arguments(spec, spec.experts)
    if spec.latent is not None:
        arguments |= {name: getattr(spec.latent, figure) for figure, name in LATENT_NAMES.items()}
        arguments["qk_nope_head_dim"] = spec.head_dim - spec.latent.rotary_size
        del arguments["head_dim"]  # there it means the rotary size
    if spec.linear is not None:
        arguments |= {name: getattr(spec.linear, figure) for figure, name in LINEAR_NAMES.items()}
    if spec.mamba is not None:
        kinds = enumerate(spec.layer_kinds)
        names = MAMBA_NAMES.get(spec.architecture, MAMBA_NAMES["bamba"])
        arguments |= {name: getattr(spec.mamba, figure) for figure, name in names.items()}
        if spec.architecture == "bamba":
            arguments["mamba_expand"] = spec.mamba.width // spec.hidden_size
            arguments["attn_layer_indices"] = [layer for layer, kind in kinds if kind.attention == "full"]
    if spec.architecture == "nemotron_h":
        types = {halves: name for name, halves in MIXERS.items()}
        arguments["layers_block_type"] = [types[kind.attention, kind.mlp] for kind in spec.layer_kinds]
    if model_type == "gemma4_text":
        arguments |= _gemma4_arguments(spec)
    if model_type == "mimo_v2_flash":
        arguments["mlp_layer_types"] = ["sparse" if kind.has_experts else "dense" for kind in spec.layer_kinds]
        arguments |= {"num_key_value_heads": spec.num_kv_heads // 2, "v_head_dim": spec.value_head_dim}
    if spec.window_tokens is not None or spec.linear is not None:
        arguments["layer_types"] = [LAYER_TYPES[kind.attention] for kind in spec.layer_kinds]
        arguments |= {} if spec.window_tokens is None else {"sliding_window": spec.window_tokens}
    if model_type == "glm4_moe":
        arguments["use_qk_norm"] = spec.qk_norm
    return model_type, arguments


def _gemma4_arguments(spec: ModelSpec) -> dict[str, Any]:
    full, reused, inputs = spec.full_heads, spec.reused, spec.layer_inputs
    found: dict[str, Any] = {"enable_moe_block": spec.experts is not None, "hidden_size_per_layer_input": 0}
    if full is not None:
        found |= {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_kv_heads}
        found["attention_k_eq_v"] = full.keys_as_values
    if reused is not None:
        found |= {"num_kv_shared_layers": reused.layers, "use_double_wide_mlp": reused.ffn_size != spec.ffn_size}
    if inputs is not None:
        found |= {"hidden_size_per_layer_input": inputs.size, "vocab_size_per_layer_input": inputs.vocab_size}
    return found


def _expert_arguments(spec: ModelSpec, experts: Experts) -> dict[str, Any]:
    names = EXPERT_NAMES.get(spec.architecture, EXPERT_NAMES["qwen3_moe"])
    found: dict[str, Any] = {name: getattr(experts, figure) for figure, name in names.items()}
    found["attention_bias"] = spec.qkv_bias
    if "n_routed_experts" in found:
        found["n_shared_experts"] = experts.shared_ffn_size // experts.ffn_size
    return found | {"norm_topk_prob": True}


def whole_config(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return (model type, configuration arguments) of the full model in transformers."""
    model_type, text = text_config(spec)
    if spec.vision is None:
        return model_type, text
    # Qwen's placeholder ids if the vocabulary is large enough, else the last two tokens.
    image_token = min(151_655, spec.vocab_size - 2)
    whole: dict[str, Any] = {"tie_word_embeddings": spec.tied_embeddings, "image_token_id": image_token}
    if spec.architecture == "internvl":
        whole |= {"text_config": {"model_type": model_type, **text}, **_internvl_config(spec.vision)}
        return "internvl", whole
    if spec.architecture == "gemma3":
        whole = {"tie_word_embeddings": spec.tied_embeddings, "image_token_index": min(262_144, spec.vocab_size - 2)}
        return "gemma3", {**whole, "text_config": text, **_gemma3_config(spec.vision)}
    if spec.architecture == "gemma4":
        return "gemma4", {**whole, "text_config": text, **gemma4_config(spec.vision)}
    # Rotary sections of time, height and width: 24, 20 and 20 of 64 in Qwen3-VL, 16, 24 and 24 in Qwen2.5-VL. Qwen3.5
    # rotates a quarter of a head: 11, 11 and 10 of 32.
    rotated = 0.25 if spec.architecture.startswith("qwen3_5") else 1.0
    half = int(spec.head_dim * rotated) // 2
    side = half * (10 if rotated < 1 else 12 if spec.architecture == "qwen2_5_vl" else 10) // 32
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "partial_rotary_factor": rotated,
        "mrope_section": [half - 2 * side, side, side],
    }
    tower = _qwen2_5_vl_tower if spec.architecture == "qwen2_5_vl" else _qwen3_vl_tower
    whole |= {"video_token_id": image_token + 1, "text_config": text, "vision_config": tower(spec.vision)}
    return spec.architecture, whole


def _internvl_config(vision: VisionSpec) -> dict[str, Any]:
    image_size = vision.image_size
    assert image_size is not None  # the description was checked
    tower = {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.num_heads,
        "image_size": [image_size] * 2,
        "patch_size": [vision.patch_size] * 2,
        "attention_bias": True,
    }
    return {
        "vision_config": tower,
        "downsample_ratio": 1 / vision.merge_size,
        "image_seq_length": (image_size // vision.patch_size // vision.merge_size) ** 2,
    }


def _gemma3_config(vision: VisionSpec) -> dict[str, Any]:
    image_size = vision.image_size
    assert image_size is not None  # the description was checked
    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.num_heads,
        "image_size": image_size,
        "patch_size": vision.patch_size,
        "vision_use_head": False,
    }
    return {"vision_config": tower, "mm_tokens_per_image": vision.table_patches // vision.merge_size**2}


def gemma4_config(vision: VisionSpec) -> dict[str, Any]:
    """Return Gemma 4's encoder blocks; it has only the vision encoder."""
    tower = {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.num_heads,
        "num_key_value_heads": vision.num_heads,
        "head_dim": vision.hidden_size // vision.num_heads,
        "pooling_kernel_size": vision.merge_size,
        "patch_size": vision.patch_size,
        "position_embedding_size": vision.axis_positions,
    }
    return {"vision_config": tower, "audio_config": None}


def _qwen3_vl_tower(vision: VisionSpec) -> dict[str, Any]:
    return {
        **_qwen_tower(vision),
        "num_position_embeddings": vision.table_patches,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
    }


def _qwen2_5_vl_tower(vision: VisionSpec) -> dict[str, Any]:
    return {
        **_qwen_tower(vision),
        "window_size": vision.window_size,
        "fullatt_block_indexes": list(vision.full_attention_layers),
        "tokens_per_second": 2,  # as in published checkpoints of all sizes
    }


def _qwen_tower(vision: VisionSpec) -> dict[str, Any]:
    return {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "depth": vision.depth,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.merge_size,
        "out_hidden_size": vision.out_hidden_size,
    }
