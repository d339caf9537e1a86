"""A model's figures as Hugging Face has them: read from a config.json, and given to transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcp_cli.errors import ProfileError

if TYPE_CHECKING:
    from fcp_cli.profiling.models import ModelSpec, VisionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class HfConfig:
    """The language model of a config.json.

    Attributes:
        architecture: one of `models.ARCHITECTURES`.
        figures: by the names of `ModelSpec`, not yet checked.
    """

    name: str
    architecture: str
    figures: Mapping[str, Any]


def read_hf_config(path: Path) -> HfConfig:
    """Read a Hugging Face config.json; the language model of a vision model is read from its own block.

    Raises:
        ProfileError: unreadable, or not a dense model of a known architecture.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ProfileError(f"cannot read the model configuration {path}: {reason}") from error
    except ValueError as error:
        raise ProfileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{path} is not a model configuration: expected a JSON object")
    text = document.get("text_config") or document.get("llm_config") or document
    return HfConfig(
        name=Path(document.get("_name_or_path") or path.resolve().parent.name).name or path.stem,
        architecture=_architecture(document, text, where=str(path)),
        figures=_text_figures(document, text, where=str(path)),
    )


def _architecture(document: Mapping[str, Any], text: Mapping[str, Any], *, where: str) -> str:
    # A vision configuration is read for its language model only: its tower's shapes differ per family.
    found = str(text.get("model_type", document.get("model_type")))
    known = {"qwen3": "qwen3", "qwen3_vl_text": "qwen3", "qwen2": "qwen2", "llama": "llama", "mistral": "llama"}
    if found not in known:
        raise ProfileError(f"{where}: model_type is {found!r}; known: {', '.join(sorted(known))}")
    return known[found]


def _text_figures(document: Mapping[str, Any], text: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    head_dim = text.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        if hidden % heads:
            raise ProfileError(
                f"{where}: head_dim is missing and hidden_size {hidden} is not divisible by num_attention_heads {heads}"
            )
        head_dim = hidden // heads
    rope = text.get("rope_parameters") or {}
    model_type = str(text.get("model_type", document.get("model_type")))
    return {
        "num_layers": text.get("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": text.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn_size": text.get("intermediate_size"),
        "vocab_size": text.get("vocab_size"),
        "tied_embeddings": text.get("tie_word_embeddings", document.get("tie_word_embeddings", True)),
        "qkv_bias": bool(text.get("attention_bias", False)) or model_type == "qwen2",
        "qk_norm": model_type in {"qwen3", "qwen3_vl_text"},
        "rope_theta": text.get("rope_theta") or rope.get("rope_theta") or 10_000.0,
        "norm_eps": text.get("rms_norm_eps") or 1e-6,
    }


def text_config(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The language model as transformers knows it: (model type, configuration arguments).

    Models with a vision tower give their language backbone: Qwen3 for Qwen3-VL, Qwen2 for InternVL.
    """
    model_type = {"qwen3_vl": "qwen3", "internvl": "qwen2"}.get(spec.architecture, spec.architecture)
    arguments: dict[str, Any] = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_theta": spec.rope_theta,
        "rms_norm_eps": spec.norm_eps,
    }
    return model_type, arguments


def whole_config(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """The whole model as transformers knows it: (model type, configuration arguments)."""
    model_type, text = text_config(spec)
    if spec.vision is None:
        return model_type, text
    image_token, video_token = _placeholders(spec.vocab_size)
    whole: dict[str, Any] = {"tie_word_embeddings": spec.tied_embeddings, "image_token_id": image_token}
    if spec.architecture == "internvl":
        whole |= {"text_config": {"model_type": model_type, **text}, **_internvl_config(spec.vision)}
        return "internvl", whole
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.pop("rope_theta"),
        "mrope_section": _mrope_section(spec.head_dim),
    }
    whole |= {"video_token_id": video_token, "text_config": text, "vision_config": _qwen3_vl_tower(spec.vision)}
    return "qwen3_vl", whole


def _internvl_config(vision: VisionSpec) -> dict[str, Any]:
    tower = {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.num_heads,
        "image_size": [vision.image_size] * 2,
        "patch_size": [vision.patch_size] * 2,
        "attention_bias": True,
    }
    return {
        "vision_config": tower,
        "downsample_ratio": 1 / vision.merge_size,
        "image_seq_length": (vision.image_size // vision.patch_size // vision.merge_size) ** 2,
    }


def _qwen3_vl_tower(vision: VisionSpec) -> dict[str, Any]:
    return {
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.ffn_size,
        "depth": vision.depth,
        "num_heads": vision.num_heads,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "spatial_merge_size": vision.merge_size,
        "out_hidden_size": vision.out_hidden_size,
        "num_position_embeddings": (vision.image_size // vision.patch_size) ** 2,
        "deepstack_visual_indexes": list(vision.deepstack_layers),
    }


def _placeholders(vocab_size: int) -> tuple[int, int]:
    """Tokens of images and of videos: those of Qwen3-VL where the vocabulary reaches so far, else the last two."""
    image_token, video_token = 151_655, 151_656
    return (image_token, video_token) if video_token < vocab_size else (vocab_size - 2, vocab_size - 1)


def _mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width, shared out as Qwen3-VL does: 24, 20, 20 of 64."""
    side = head_dim // 2 * 20 // 64
    return [head_dim // 2 - 2 * side, side, side]
