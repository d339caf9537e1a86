"""The folder of a vision-language checkpoint is described with its encoder, as the shipped description of the model is."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.models.model import ModelSpec, load_model, read_description, shipped_names
from fcp_cli.models.transformers_config import whole_config
from tests.messages import raises

_WITH_ENCODER = [name for name in shipped_names("model") if load_model(name).vision is not None]
# Text figures of one file, encoder of another: as published checkpoints have them.
_QWEN2_5_TEXT = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    **_QWEN2_5_TEXT,
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
}
_INTERNVL = {
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "llm_config": {"model_type": "qwen2", **_QWEN2_5_TEXT, "vocab_size": 151674},
    "vision_config": {
        "model_type": "intern_vit_6b",
        "hidden_size": 1024,
        "image_size": 448,
        "intermediate_size": 4096,
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
    },
}
_GEMMA = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "rope_theta": 1000000.0,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def _write(folder: Path, document: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def _require_equal_models(found: ModelSpec, known: ModelSpec) -> None:
    for f in fields(ModelSpec):
        if f.name not in ("name", "aliases", "sources", "attention"):
            assert getattr(found, f.name) == getattr(known, f.name), f.name
    assert found.layer_kinds == known.layer_kinds


@pytest.mark.hf
@pytest.mark.parametrize("omits_defaults", [True, False])
@pytest.mark.parametrize("name", _WITH_ENCODER)
def test_a_folder_that_transformers_saved_gives_the_shipped_model(
    name: str, omits_defaults: bool, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    model_type, arguments = whole_config(load_model(name))
    if model_type == "gemma3":
        arguments["text_config"] |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    config = AutoConfig.for_model(model_type, **arguments)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=omits_defaults))
    _require_equal_models(load_model(tmp_path), load_model(name))


@pytest.mark.hf
def test_an_internvl_on_qwen3_is_described_and_built_as_such(tmp_path: Path) -> None:
    from transformers import AutoConfig

    spec = replace(load_model("internvl3-8b"), qk_norm=True, qkv_bias=False)
    model_type, arguments = whole_config(spec)
    assert arguments["text_config"]["model_type"] == "qwen3"
    (tmp_path / "config.json").write_text(AutoConfig.for_model(model_type, **arguments).to_json_string())
    _require_equal_models(load_model(tmp_path), spec)


@pytest.mark.parametrize(
    ("document", "name"), [(_QWEN2_5_VL, "qwen2.5-vl-7b"), (_INTERNVL, "internvl3-8b"), (_GEMMA, "gemma3-vl-27b")]
)
def test_a_published_file_gives_the_shipped_model(document: dict[str, Any], name: str, tmp_path: Path) -> None:
    _require_equal_models(load_model(_write(tmp_path, document)), load_model(name))


def test_every_shipped_model_with_an_encoder_is_held_by_these_tests() -> None:
    from fcp_cli.util.files import shipped

    files = [shipped("profiles") / "models" / f"{name}.yaml" for name in shipped_names("model")]
    assert len(_WITH_ENCODER) == sum("vision" in read_description(file, kind="model") for file in files) > 5


def _changed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the file with keys of its encoder changed, or, with `whole`, keys of its own."""
    whole = changes.pop("whole", {})
    return {**document, "vision_config": {**document["vision_config"], **changes}, **whole}


REFUSED: dict[str, dict[str, Any]] = {
    "an encoder of another family": {
        "model_type": "llava",
        "text_config": {"model_type": "llama"},
        "vision_config": {},
    },
    "a tower in a model of text": {"model_type": "qwen3", "mm_vision_tower": "openai/clip"},
    "no encoder": {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}},
    "an encoder that is a list": _changed(_GEMMA, whole={"vision_config": [1]}),
    "another language model": _changed(_GEMMA, whole={"text_config": {"model_type": "llama"}}),
    "a head": _changed(_GEMMA, vision_use_head=True),
    "image tokens that are no square": _changed(_GEMMA, whole={"mm_tokens_per_image": 250}),
    "patches that are no squares": _changed(_GEMMA, patch_size=[14, 16]),
    "a size as text": _changed(_GEMMA, image_size="large"),
    "normalised queries and keys": _changed(_INTERNVL, qk_normalization=True),
    "a ratio that merges no whole patches": _changed(_INTERNVL, whole={"downsample_ratio": 0.3}),
    "another width than the language model's": _changed(_QWEN2_5_VL, out_hidden_size=2048),
    "no blocks": _changed(_QWEN2_5_VL, depth=-1),
}
REFUSED_MESSAGES = snapshot(
    {
        "an encoder of another family": "ProfileError: FOLDER/config.json: model_type 'llava' has an encoder (vision_config) that fcp cannot describe; known are gemma3, gemma4, internvl, internvl_chat, qwen2_5_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe. Give a description by --model MODEL.yaml",
        "a tower in a model of text": "ProfileError: FOLDER/config.json: model_type 'qwen3' has an encoder (mm_vision_tower) that fcp cannot describe; known are gemma3, gemma4, internvl, internvl_chat, qwen2_5_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe. Give a description by --model MODEL.yaml",
        "no encoder": "ProfileError: FOLDER/config.json: model_type is 'qwen3_vl', and vision_config is missing",
        "an encoder that is a list": "ProfileError: FOLDER/config.json: vision_config is a list; it must be a mapping",
        "another language model": "ProfileError: FOLDER/config.json: text_config.model_type is 'llama'; known for gemma3: gemma3_text",
        "a head": "ProfileError: FOLDER/config.json: vision_config.vision_use_head is True; only False is known",
        "image tokens that are no square": "ProfileError: FOLDER/config.json: mm_tokens_per_image is 250; it must be the square of an integer",
        "patches that are no squares": "ProfileError: FOLDER/config.json: vision_config.patch_size is [14, 16]; only squares are supported",
        "a size as text": "ProfileError: FOLDER/config.json: image_size is 'large'; it must be a positive integer",
        "normalised queries and keys": "ProfileError: FOLDER/config.json: vision_config.qk_normalization is True; only False is known",
        "a ratio that merges no whole patches": "ProfileError: FOLDER/config.json: downsample_ratio is 0.3; only 1 / n is supported",
        "another width than the language model's": "ProfileError: FOLDER/config.json: vision.out_hidden_size 2048 differs from text.hidden_size 3584",
        "no blocks": "ProfileError: FOLDER/config.json: vision_config: depth is -1; it must be a whole number of at least 1",
    }
)


@pytest.mark.parametrize("case", REFUSED)
def test_an_encoder_that_cannot_be_described_is_refused(tmp_path: Path, case: str) -> None:
    with raises(REFUSED_MESSAGES[case]):
        load_model(_write(tmp_path, REFUSED[case]))
