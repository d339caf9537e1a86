"""Reads the figures of a model from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.errors import ProfileError
from fcp_cli.reading.documents import kind_of, read_json

_ARCHITECTURES: Final[Mapping[str, Literal["qwen3", "qwen2", "llama"]]] = {
    "qwen3": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen2": "qwen2",
    "qwen2_5_vl": "qwen2",  # whose published files hold the language model's figures beside the tower's block
    "qwen2_5_vl_text": "qwen2",
    "llama": "llama",
    "mistral": "llama",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HfConfig:
    """The language model of a config.json.

    Attributes:
        architecture: as `ModelSpec` has it.
        figures: by the names of `TextFigures`, not yet checked; what the file leaves out is missing.
    """

    name: str
    architecture: Literal["qwen3", "qwen2", "llama"]
    figures: Mapping[str, Any]


def read_hf_config(path: Path) -> HfConfig:
    """Read a Hugging Face config.json; the language model of a vision model is read from its own block.

    Raises:
        ProfileError: unreadable, or not a dense model of a known architecture.
    """
    document = read_json(path, error=ProfileError, what="the model configuration ")
    if not isinstance(document, dict):
        raise ProfileError(f"{path} is not a model configuration: expected a JSON object")
    text = _block(document, "text_config", path) or _block(document, "llm_config", path) or document
    figures = _text_figures(document, text, where=str(path))
    return HfConfig(
        name=Path(_named(document) or path.resolve().parent.name).name or path.stem,
        architecture=_architecture(document, text, where=str(path)),
        figures={key: value for key, value in figures.items() if value is not None},
    )


def _block(document: Mapping[str, Any], key: str, path: Path | str) -> dict[str, Any]:
    """Return a block of a configuration; empty where it has none.

    Raises:
        ProfileError: something else stands in its place.
    """
    block = document.get(key) or {}
    if not isinstance(block, dict):
        raise ProfileError(f"{path}: {key} is {kind_of(block)}; it must be a mapping")
    return block


def _named(document: Mapping[str, Any]) -> str:
    name = document.get("_name_or_path")
    return name if isinstance(name, str) else ""


def _architecture(
    document: Mapping[str, Any], text: Mapping[str, Any], *, where: str
) -> Literal["qwen3", "qwen2", "llama"]:
    # A vision configuration is read for its language model only: its tower's shapes differ per family.
    found = str(text.get("model_type", document.get("model_type")))
    if found not in _ARCHITECTURES:
        raise ProfileError(f"{where}: model_type is {found!r}; known: {', '.join(sorted(_ARCHITECTURES))}")
    return _ARCHITECTURES[found]


def _text_figures(document: Mapping[str, Any], text: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    head_dim = text.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        if hidden % heads:
            raise ProfileError(
                f"{where}: head_dim is missing and hidden_size {hidden} is not divisible by num_attention_heads {heads}"
            )
        head_dim = hidden // heads
    rope = _block(text, "rope_parameters", where)
    model_type = str(text.get("model_type", document.get("model_type")))
    is_qwen2_5 = model_type in {"qwen2_5_vl", "qwen2_5_vl_text"}  # untied where it does not say
    return {
        "num_layers": text.get("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": text.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "ffn_size": text.get("intermediate_size"),
        "vocab_size": text.get("vocab_size"),
        "tied_embeddings": text.get("tie_word_embeddings", document.get("tie_word_embeddings", not is_qwen2_5)),
        "qkv_bias": bool(text.get("attention_bias", False)) or model_type == "qwen2" or is_qwen2_5,
        "qk_norm": model_type in {"qwen3", "qwen3_vl_text"},
        "rope_theta": text.get("rope_theta") or rope.get("rope_theta") or 10_000.0,
        "norm_eps": text.get("rms_norm_eps") or 1e-6,
    }
