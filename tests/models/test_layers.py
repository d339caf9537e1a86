"""What a description says of a model's layers against transformers' own classes, which run on the meta device."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.activations import final_norm_bytes, input_bytes, layer_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.models.layers import TextFigures
from fcp_cli.models.model import ModelSpec, load_hf_config, load_model
from fcp_cli.models.transformers_config import text_config
from tests.messages import raises

# Models of one kind of layer and of several, with as many layers as have all of their kinds.
FEW_LAYERS = {
    "llama3-70b": 2,
    "qwen3-32b": 2,
    "qwen3-30b-a3b": 2,
    "qwen3-vl-30b-a3b": 2,
    "qwen3-235b-a22b": 2,
    "gemma3-27b": 6,
    "gpt-oss-20b": 2,
    "gpt-oss-120b": 2,
    "deepseek-v3": 4,
    "glm-4.5": 4,
    "qwen3-next-80b-a3b": 4,
    "bamba-9b": 10,
}


def require_equal_figures(spec: ModelSpec, *, tokens: int) -> None:
    from benchmarks.model_figures import causal_operations, counted

    found = counted(spec, tokens=tokens)
    assert spec.text_parameters == found.parameters
    assert causal_operations(spec, tokens) == pytest.approx(found.operations, rel=0.002)
    precision = precision_of(Recipe())
    kept = sum(count * layer_bytes(spec, kind, precision) for kind, count in spec.kinds.items())
    kept += input_bytes(spec, precision) - 2 * 8  # without positions and labels
    kept += final_norm_bytes(spec, precision) - precision.activation * spec.hidden_size  # which the head would read
    assert kept == pytest.approx(found.bytes_per_token, rel=0.002)


@pytest.mark.examples(4)
@pytest.mark.hf
@pytest.mark.parametrize("name", FEW_LAYERS)
def test_a_few_layers_have_the_parameters_operations_and_bytes_of_transformers_own(name: str) -> None:
    require_equal_figures(replace(load_model(name), num_layers=FEW_LAYERS[name]), tokens=2048)


@pytest.mark.full
@pytest.mark.hf
@pytest.mark.parametrize("name", ["qwen3-8b", *FEW_LAYERS])
def test_whole_models_have_the_parameters_operations_and_bytes_of_transformers_own(name: str) -> None:
    require_equal_figures(load_model(name), tokens=8192)


@pytest.mark.hf
@pytest.mark.parametrize("name", FEW_LAYERS)
def test_a_configuration_of_each_family_gives_the_shipped_figures(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    spec = load_model(name)
    model_type, figures = text_config(spec)
    config = AutoConfig.for_model(model_type, **figures)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    found = load_hf_config(tmp_path / "config.json")
    for f in fields(TextFigures):
        if f.name not in ("attention", "rope_theta"):
            assert getattr(found, f.name) == getattr(spec, f.name), f.name
    assert found.layer_kinds == spec.layer_kinds


_GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_hidden_layers": 62,
    "head_dim": 128,
    "sliding_window": 1024,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 24,
    "head_dim": 64,
    "sliding_window": 128,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}


@pytest.mark.parametrize(
    ("document", "name"),
    [(_GEMMA, "gemma3-27b"), (_GPT_OSS, "gpt-oss-20b")],
)
def test_what_published_files_leave_to_their_class_is_known(document: Any, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    found, known = load_model(tmp_path), load_model(name)
    assert (found.text_parameters, found.layer_kinds) == (known.text_parameters, known.layer_kinds)
    assert found.window_tokens == known.window_tokens


LAYERS: dict[str, dict[str, Any]] = {
    "an unknown kind of attention": {"layer_types": ["full_attention", "chunked_attention"]},
    "windows without a size": {"sliding_window": None},
    "more experts for a token than there are": {"num_local_experts": 3},
    "experts of which none is said to be active": {"num_experts_per_tok": None},
    "experts in some layers alone": {"model_type": "qwen3_moe", "mlp_only_layers": [3]},
}
LAYERS_MESSAGES = snapshot(
    {
        "an unknown kind of attention": "ProfileError: FOLDER/config.json: layer_types has 'chunked_attention'; known: full_attention, sliding_attention, linear_attention",
        "windows without a size": "ProfileError: FOLDER/config.json: attention has window layers, and window_tokens is missing",
        "more experts for a token than there are": "ProfileError: FOLDER/config.json: experts.active 4 exceeds experts.count 3",
        "experts of which none is said to be active": "ProfileError: FOLDER/config.json: experts.active is missing",
        "experts in some layers alone": "ProfileError: FOLDER/config.json: mlp_only_layers is [3]; only models with experts in all layers but the first are supported",
    }
)


@pytest.mark.parametrize("case", LAYERS)
def test_layers_that_cannot_be_are_rejected(tmp_path: Path, case: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_GPT_OSS | LAYERS[case]))
    with raises(LAYERS_MESSAGES[case]):
        load_model(tmp_path)


def test_a_token_meets_the_published_number_of_parameters() -> None:
    names = ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "glm-4.5", "qwen3-next")
    active = {name: round(load_model(name).active_parameters / 1e9, 1) for name in names}
    assert active == snapshot(
        {
            "qwen3-30b-a3b": 3.4,
            "qwen3-235b-a22b": 22.2,
            "gpt-oss-120b": 5.8,
            "deepseek-v3": 37.6,
            "glm-4.5": 33.6,
            "qwen3-next": 3.9,
        }
    )
