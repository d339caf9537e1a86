"""Reads the vision encoder of a Hugging Face config.json.

Missing keys have the defaults of transformers' configuration class, which saves only differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import ProfileError
from fcp_cli.models.layers import Architecture
from fcp_cli.util.inputs import kind_of


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFamily:
    """A family of vision-language models.

    Attributes:
        architecture: see `ModelSpec`.
        text_types: possible model types of its language model; the first is the default.
        is_tied: default for tied embeddings; None: the language model's block decides.
        read: returns fields of `VisionSpec` from the encoder's block and the full document.
    """

    architecture: Architecture
    text_types: tuple[str, ...]
    is_tied: bool | None
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]


class _FigureError(ValueError):
    """A value that makes the encoder one that fcp does not support."""


def family_of(document: Mapping[str, Any], *, where: Path) -> VisionFamily | None:
    """Return the family of a vision-language model, or None for a language model.

    Raises:
        ProfileError: the encoder is not supported, or its block is missing.
    """
    model_type = document.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    encoder = next((key for key, value in document.items() if _is_encoder(key, value)), None)
    if family is None and encoder is not None:
        raise ProfileError(
            f"{where}: model_type {model_type!r} has an encoder ({encoder}) that fcp cannot describe; known are "
            f"{', '.join(sorted(_FAMILIES))}. Give a description by --model MODEL.yaml"
        )
    if family is not None and "vision_config" not in document:
        raise ProfileError(f"{where}: model_type is {model_type!r}, and vision_config is missing")
    return family


def _is_encoder(key: str, value: Any) -> bool:
    names_one = any(word in key for word in ("vision", "visual", "audio"))
    return names_one and (isinstance(value, dict) or (key.endswith("_tower") and isinstance(value, str)))


def vision_figures(document: Mapping[str, Any], family: VisionFamily, *, where: Path) -> dict[str, Any]:
    """Return unvalidated fields of `VisionSpec`.

    Raises:
        ProfileError: the block is not a mapping, or has an unsupported value.
    """
    tower = document["vision_config"]
    if not isinstance(tower, dict):
        raise ProfileError(f"{where}: vision_config is {kind_of(tower)}; it must be a mapping")
    try:
        return family.read(tower, document)
    except _FigureError as error:
        raise ProfileError(f"{where}: {error}") from error


_QWEN_NAMES: Final = {
    "depth": "depth",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "ffn_size": "intermediate_size",
    "merge_size": "spatial_merge_size",
    "out_hidden_size": "out_hidden_size",
}
# Defaults of Qwen3VLVisionConfig and Qwen2_5_VLVisionConfig in transformers 5.23.
_QWEN3_VL: Final = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN2_5_VL: Final = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "intermediate_size": 3420,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def _read_qwen3_vl(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    tower = {**_QWEN3_VL, **tower}
    figures = _qwen_figures(tower) | {"kind": "qwen3_vl", "deepstack_layers": tower["deepstack_visual_indexes"]}
    side = _root(tower, "num_position_embeddings")
    return figures | {"image_size": side * _whole(figures["patch_size"], "patch_size")}


def _read_qwen3_5(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    return _read_qwen3_vl({**tower, "deepstack_visual_indexes": []}, document)


def _read_qwen2_5_vl(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    tower = {**_QWEN2_5_VL, **tower}
    kinds = {"window_size": tower["window_size"], "full_attention_layers": tower["fullatt_block_indexes"]}
    return _qwen_figures(tower) | {"kind": "qwen2_5_vl", **kinds}


def _qwen_figures(tower: Mapping[str, Any]) -> dict[str, Any]:
    figures = {figure: tower[name] for figure, name in _QWEN_NAMES.items()}
    return figures | {name: _side(tower, name) for name in ("patch_size", "temporal_patch_size")}


# Defaults of InternVLVisionConfig, and of the InternViT that comes with checkpoints of `internvl_chat`.
_INTERNVIT: Final = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 448,
    "patch_size": 14,
}
# Key in either file format -> the only value for which parameter counts hold. Biases of queries, keys and values may be
# present or not: they are a few thousand parameters and no operations.
_INTERNVIT_BLOCKS: Final = {
    "use_qk_norm": False,
    "qk_normalization": False,
    "norm_type": "layer_norm",
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
    "use_mask_token": False,
}


def _read_internvl(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    for name, described in _INTERNVIT_BLOCKS.items():
        if tower.get(name, described) != described:
            raise _FigureError(f"vision_config.{name} is {tower[name]!r}; only {described!r} is known")
    tower = {**_INTERNVIT, **tower}
    ratio = document.get("downsample_ratio", 0.5)
    merge = round(1 / ratio) if isinstance(ratio, float) and 0 < ratio <= 1 else 0
    if merge == 0 or 1 / merge != ratio:
        raise _FigureError(f"downsample_ratio is {ratio!r}; only 1 / n is supported")
    return {
        "kind": "internvit",
        "temporal_patch_size": 1,
        "merge_size": merge,
        "image_size": _side(tower, "image_size"),
        **_blocks(tower, document),
    }


# Defaults of SiglipVisionConfig in transformers 5.23.
_SIGLIP: Final = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}


def _read_gemma3(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    tower = {**_SIGLIP, **tower}
    if tower["vision_use_head"] is not False:
        raise _FigureError(f"vision_config.vision_use_head is {tower['vision_use_head']!r}; only False is known")
    figures = {"kind": "siglip", "temporal_patch_size": 1, "image_size": _side(tower, "image_size")}
    figures |= _blocks(tower, document)
    image, patch = (_whole(figures[name], name) for name in ("image_size", "patch_size"))
    tokens = _root({"mm_tokens_per_image": 256, **document}, "mm_tokens_per_image")
    if image % patch or image // patch % tokens:
        raise _FigureError(f"{tokens**2} tokens do not tile an image of {image} pixels with patches of {patch} pixels")
    return figures | {"merge_size": image // patch // tokens}


# Defaults of Gemma4VisionConfig in transformers 5.24.
_GEMMA4: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
}


def _read_gemma4(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    if document.get("audio_config") is not None:
        raise _FigureError(
            "audio_config is an encoder that fcp cannot describe; a copy of the file without it is the model that "
            "transformers builds for text and images"
        )
    tower = {**_GEMMA4, **tower}
    heads, size = tower["num_attention_heads"], _whole(tower["head_dim"], "head_dim")
    known = {"num_key_value_heads": heads, "hidden_size": heads * size}
    for name, described in known.items():
        if tower[name] != described:
            raise _FigureError(f"vision_config.{name} is {tower[name]!r}; only {described!r} is known")
    return _blocks(tower, document) | {
        "kind": "gemma4",
        "temporal_patch_size": 1,
        "merge_size": tower["pooling_kernel_size"],
        "axis_positions": tower["position_embedding_size"],
    }


def _blocks(tower: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    text = document.get("text_config") or document.get("llm_config") or {}
    return {
        "depth": tower["num_hidden_layers"],
        "hidden_size": tower["hidden_size"],
        "num_heads": tower["num_attention_heads"],
        "ffn_size": tower["intermediate_size"],
        "patch_size": _side(tower, "patch_size"),
        "out_hidden_size": text.get("hidden_size") if isinstance(text, dict) else None,
    }


def _side(tower: Mapping[str, Any], name: str) -> Any:
    """Return a size that is stored as a number or as a list of equal sides."""
    size = tower[name]
    if not isinstance(size, list):
        return size
    if len(size) != 2 or size[0] != size[1]:
        raise _FigureError(f"vision_config.{name} is {size}; only squares are supported")
    return size[0]


def _root(values: Mapping[str, Any], name: str) -> int:
    count = _whole(values[name], name)
    if math.isqrt(count) ** 2 != count:
        raise _FigureError(f"{name} is {count}; it must be the square of an integer")
    return math.isqrt(count)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 24:
        raise _FigureError(f"{name} is {value!r}; it must be a positive integer")
    return value


_INTERNVL_TEXT: Final = ("qwen2", "qwen3", "qwen3_moe")
_FAMILIES: Final[Mapping[str, VisionFamily]] = {
    "qwen3_vl": VisionFamily(
        architecture="qwen3_vl", text_types=("qwen3_vl_text",), is_tied=False, read=_read_qwen3_vl
    ),
    "qwen3_vl_moe": VisionFamily(
        architecture="qwen3_vl_moe", text_types=("qwen3_vl_moe_text",), is_tied=False, read=_read_qwen3_vl
    ),
    "qwen3_5": VisionFamily(architecture="qwen3_5", text_types=("qwen3_5_text",), is_tied=False, read=_read_qwen3_5),
    "qwen3_5_moe": VisionFamily(
        architecture="qwen3_5_moe", text_types=("qwen3_5_moe_text",), is_tied=False, read=_read_qwen3_5
    ),
    "qwen2_5_vl": VisionFamily(
        architecture="qwen2_5_vl", text_types=("qwen2_5_vl_text",), is_tied=False, read=_read_qwen2_5_vl
    ),
    "internvl": VisionFamily(architecture="internvl", text_types=_INTERNVL_TEXT, is_tied=True, read=_read_internvl),
    "internvl_chat": VisionFamily(
        architecture="internvl", text_types=_INTERNVL_TEXT, is_tied=None, read=_read_internvl
    ),
    "gemma4": VisionFamily(architecture="gemma4", text_types=("gemma4_text",), is_tied=True, read=_read_gemma4),
    "gemma3": VisionFamily(architecture="gemma3", text_types=("gemma3_text",), is_tied=True, read=_read_gemma3),
}
