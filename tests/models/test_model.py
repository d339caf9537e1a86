from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from inline_snapshot import snapshot

from fcp_cli.errors import ProfileError
from fcp_cli.models.model import ModelSpec, VisionSpec, load_hf_config, load_model, shipped_names
from fcp_cli.models.transformers_config import text_config, whole_config
from fcp_cli.util.files import shipped
from tests.messages import raises

# Published sizes in 1e9 parameters: language model, vision encoder with what joins it to the language model.
SIZES = {
    "qwen3-1.7b": (1.721, None),
    "qwen3-4b": (4.022, None),
    "qwen3-8b": (8.191, None),
    "llama3.2-1b": (1.236, None),
    "llama3.2-3b": (3.213, None),
    "llama3-8b": (8.030, None),
    "internvl3-2b": (1.776, 0.313),
    "internvl3-8b": (7.613, 0.332),
    "internvl2.5-4b": (3.396, 0.317),
    "qwen2.5-vl-7b": (7.616, 0.677),
    "qwen3-vl-2b": (1.721, 0.407),
    "qwen3-vl-4b": (4.022, 0.415),
    "qwen3-vl-8b": (8.191, 0.576),
    "qwen3-32b": (32.762, None),
    "llama3-70b": (70.554, None),
    "qwen3-30b-a3b": (30.532, None),
    "qwen3-235b-a22b": (235.094, None),
    "qwen3-vl-30b-a3b": (30.532, 0.539),
    "gemma3-27b": (27.009, None),
    "gemma3-vl-27b": (27.009, 0.423),
    "gpt-oss-20b": (20.915, None),
    "gpt-oss-120b": (116.829, None),
    "deepseek-v3": (671.026, None),
    "glm-4.5": (352.798, None),
    "qwen3-next-80b-a3b": (79.674, None),
    "bamba-9b": (9.780, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_parameters_recomputed_from_the_figures_are_the_published_ones(name: str) -> None:
    text, vision = SIZES[name]
    spec = load_model(name)
    assert spec.text_parameters / 1e9 == pytest.approx(text, abs=5e-4)
    assert (spec.vision and spec.vision.parameters / 1e9) == (vision and pytest.approx(vision, abs=5e-4))


def test_the_intern_vision_encoder_has_its_published_size() -> None:
    vision = load_model("internvl3-8b").vision
    assert vision is not None
    assert vision.encoder_parameters / 1e9 == pytest.approx(0.304, abs=5e-4)


def test_the_models_of_known_size_and_the_tiny_ones_are_shipped() -> None:
    assert set(shipped_names("model")) == {*SIZES, "qwen3-tiny", "qwen3-vl-tiny"}


@pytest.mark.parametrize("name", shipped_names("model"))
def test_every_figure_has_a_source(name: str) -> None:
    spec = load_model(name)
    assert "text" in spec.sources
    assert (spec.vision is None) == ("vision" not in spec.sources)
    names = {f.name for f in fields(ModelSpec)} | {f.name for f in fields(VisionSpec)}
    for key, source in spec.sources.items():
        assert key.split(".")[-1] in names | {"text"}, key
        assert source


@pytest.mark.parametrize("name", ["qwen3vl-8b", "Qwen3-VL-8B", "Qwen/Qwen3-VL-8B-Instruct", "QWEN3_VL_8B"])
def test_a_model_is_found_by_alias_and_spelling(name: str) -> None:
    assert load_model(name).name == "qwen3-vl-8b"


@pytest.mark.parametrize(
    "name", ["qwen2.5-vl-7b", "qwen2_5-vl-7b", "qwen25vl-7b", "qwen25-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct"]
)
def test_qwen2_5_vl_is_found_with_and_without_its_dot(name: str) -> None:
    assert load_model(name).name == "qwen2.5-vl-7b"


def test_an_unknown_model_lists_the_nearest() -> None:
    with raises(
        snapshot(
            "ProfileError: unknown model 'qwen3-9b'; nearest: qwen3-8b, qwen3-4b, qwen3-32b; or give a YAML or the folder of a checkpoint"
        )
    ):
        load_model("qwen3-9b")


def test_an_unknown_model_lists_the_nearest_checkpoint_here_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "checkpoint", tmp_path / "runs" / "mine", tmp_path / "chekpoin"):
        folder.mkdir(parents=True)
    for name in ("checkpoint", "runs/mine"):
        (tmp_path / name / "config.json").touch()
    near = "ProfileError: unknown model 'chekpoint'; nearest: checkpoint; or give a YAML or the folder of a checkpoint"
    with raises(near):
        load_model("chekpoint")
    missing = "is not a YAML, a config.json or the folder of a checkpoint, or does not exist"
    with raises(f"ProfileError: ./runs/mien {missing}; nearest: ./runs/mine"):
        load_model("./runs/mien")


@pytest.mark.parametrize("path", ["./Qwen3-8B", "/models/Qwen/Qwen3-8B", "models/Qwen/Qwen3-8B"])
def test_the_path_of_a_folder_that_is_missing_is_not_the_shipped_model_of_its_name(path: str) -> None:
    with pytest.raises(ProfileError) as error:
        load_model(path)
    assert str(error.value) == (
        f"{path} is not a YAML, a config.json or the folder of a checkpoint, or does not exist; names of shipped "
        "models: 'fcp list models'"
    )


def _document(name: str = "qwen3-8b", **changes: Any) -> dict[str, Any]:
    """The description of a shipped model; `vision`, `architecture` and `format` are changed beside its text figures."""
    document: dict[str, Any] = yaml.safe_load((shipped("profiles") / "models" / f"{name}.yaml").read_text())
    for key in ("architecture", "format"):
        document[key] = changes.pop(key, document[key])
    document.get("vision", {}).update(changes.pop("vision", {}))
    document["text"].update(changes)
    return document


DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "heads that the keys do not divide": _document(num_kv_heads=7),
    "an odd head": _document(head_dim=127),
    "no layers": _document(num_layers=0),
    "half a layer": _document(num_layers=36.5),
    "a truth value": _document(hidden_size=True),
    "neither an MLP nor experts": _document(ffn_size=None),
    "a number for a truth value": _document(qk_norm=1),
    "a misspelt figure": _document(fnn_size=3),
    "no number": _document(norm_eps=float("nan")),
    "an architecture of no family": _document(architecture="mamba"),
    "a cluster": {"format": "fcp-cluster/1"},
    "a tower of another width": _document("qwen3-vl-8b", vision={"out_hidden_size": 2048}),
    "deepstack beyond the tower": _document("qwen3-vl-8b", vision={"deepstack_layers": [8, 27]}),
    "whole attention beyond the tower": _document("qwen2.5-vl-7b", vision={"full_attention_layers": [7, 32]}),
    "windows smaller than a token": _document("qwen2.5-vl-7b", vision={"window_size": 27}),
    "a table of positions that the kind has not": _document("qwen2.5-vl-7b", vision={"image_size": 448}),
    "latent attention with grouped heads": _document("deepseek-v3", num_kv_heads=8),
    "latent attention without its figures": _document("deepseek-v3", latent=None),
    "an unknown kind of attention": _document("qwen3-next-80b-a3b", attention=["linear", "rwkv"]),
    "states without their figures": _document("bamba-9b", mamba=None),
    "heads of states that do not make the width": _document("bamba-9b", hidden_size=5120),
}
DESCRIPTIONS_MESSAGES = snapshot(
    {
        "heads that the keys do not divide": "ProfileError: FOLDER/model.yaml: num_kv_heads 7 does not divide num_heads 32",
        "an odd head": "ProfileError: FOLDER/model.yaml: head_dim 127 is odd; rotary positions need an even one",
        "no layers": "ProfileError: FOLDER/model.yaml: text.num_layers is 0; it must be a whole number of at least 1",
        "half a layer": "ProfileError: FOLDER/model.yaml: text.num_layers is 36.5; it must be a whole number of at least 1",
        "a truth value": "ProfileError: FOLDER/model.yaml: text.hidden_size is True; it must be a whole number of at least 1",
        "neither an MLP nor experts": "ProfileError: FOLDER/model.yaml: ffn_size is missing, and layers have no experts",
        "a number for a truth value": "ProfileError: FOLDER/model.yaml: text.qk_norm is 1; it must be true or false",
        "a misspelt figure": "ProfileError: FOLDER/model.yaml: unknown key text.fnn_size; did you mean text.ffn_size?",
        "no number": "ProfileError: FOLDER/model.yaml: text.norm_eps is nan; it must be a finite number",
        "an architecture of no family": "ProfileError: FOLDER/model.yaml: architecture is 'mamba'; it must be one of bamba, deepseek_v3, gemma3, gemma3_text, gemma4, gemma4_text, glm4_moe, glm4_moe_lite, gpt_oss, internvl, llama, mimo_v2_flash, minimax_m2, nemotron_h, qwen2, qwen2_5_vl, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next, qwen3_vl, qwen3_vl_moe",
        "a cluster": "ProfileError: FOLDER/model.yaml is not a model description: expected 'format: fcp-model/1', found 'fcp-cluster/1'",
        "a tower of another width": "ProfileError: FOLDER/model.yaml: vision.out_hidden_size 2048 differs from text.hidden_size 4096",
        "deepstack beyond the tower": "ProfileError: FOLDER/model.yaml: vision.deepstack_layers [8, 27] has blocks beyond vision.depth 27",
        "whole attention beyond the tower": "ProfileError: FOLDER/model.yaml: vision.full_attention_layers [7, 32] has blocks beyond vision.depth 32",
        "windows smaller than a token": "ProfileError: FOLDER/model.yaml: vision.window_size 27 is smaller than merge_size x patch_size",
        "a table of positions that the kind has not": "ProfileError: FOLDER/model.yaml: vision.image_size is 448; kinds but qwen2_5_vl and gemma4 have a table of positions in a square, and need it",
        "latent attention with grouped heads": "ProfileError: FOLDER/model.yaml: num_kv_heads 8 differs from num_heads 128, and attention is latent",
        "latent attention without its figures": "ProfileError: FOLDER/model.yaml: attention has latent layers, and latent is missing",
        "an unknown kind of attention": "ProfileError: FOLDER/model.yaml: text.attention[1] is 'rwkv'; it must be one of full, latent, linear, mamba, none, window",
        "states without their figures": "ProfileError: FOLDER/model.yaml: attention has mamba layers, and mamba is missing",
        "heads of states that do not make the width": "ProfileError: FOLDER/model.yaml: mamba.heads 128 of mamba.head_size 64 are no multiple of hidden_size 5120",
    }
)


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_a_description_that_cannot_be_is_rejected_by_name(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(DESCRIPTIONS[case]))
    with raises(DESCRIPTIONS_MESSAGES[case]):
        load_model(tmp_path / "model.yaml")


def _hf_config(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def test_a_hugging_face_configuration_gives_the_shipped_figures(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_hf_config()))
    found, known = load_hf_config(path), load_model("qwen3-8b")
    for f in fields(ModelSpec):
        if f.name not in ("name", "aliases", "sources"):
            assert getattr(found, f.name) == getattr(known, f.name), f.name
    assert load_model(tmp_path) == found


CONFIGS: dict[str, dict[str, Any]] = {
    "an unknown model": {"model_type": "mamba"},
    "heads that do not make the width": {"num_attention_heads": 30, "head_dim": None},
    "keys that do not divide the heads": {"num_key_value_heads": 5},
    "no vocabulary": {"vocab_size": None},
}
CONFIGS_MESSAGES = snapshot(
    {
        "an unknown model": "ProfileError: FOLDER/config.json: model_type is 'mamba'; known: bamba, deepseek_v3, gemma3_text, gemma4_text, glm4_moe, glm4_moe_lite, gpt_oss, llama, mimo_v2_flash, minimax_m2, mistral, nemotron_h, qwen2, qwen2_5_vl_text, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, qwen3_vl_moe_text, qwen3_vl_text",
        "heads that do not make the width": "ProfileError: FOLDER/config.json: head_dim is missing and hidden_size 4096 is not divisible by num_attention_heads 30",
        "keys that do not divide the heads": "ProfileError: FOLDER/config.json: num_kv_heads 5 does not divide num_heads 32",
        "no vocabulary": "ProfileError: FOLDER/config.json: vocab_size is missing",
    }
)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_contradictory_configuration_is_rejected(tmp_path: Path, case: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_hf_config(**CONFIGS[case])))
    with raises(CONFIGS_MESSAGES[case]):
        load_model(path)


@pytest.mark.hf
@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-8b", "llama3.2-1b", "internvl3-8b"])
def test_the_transformers_class_has_as_many_parameters(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = load_model(name)
    model_type, figures = text_config(spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **figures))  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.text_parameters


@pytest.mark.hf
@pytest.mark.parametrize("name", [name for name in shipped_names("model") if load_model(name).vision])
def test_the_whole_vision_model_has_as_many_parameters(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    spec = load_model(name)
    model_type, figures = whole_config(spec)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **figures))  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters
