from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from inline_snapshot import snapshot

from fcp_cli.errors import ProfileError
from fcp_cli.files import shipped
from fcp_cli.models.descriptions import shipped_names
from fcp_cli.models.model import ModelSpec, VisionSpec, load_hf_config, load_model
from fcp_cli.models.transformers_config import text_config, whole_config
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


@pytest.mark.parametrize("path", ["./Qwen3-8B", "/models/Qwen/Qwen3-8B", "models/Qwen/Qwen3-8B"])
def test_the_path_of_a_folder_that_is_missing_is_not_the_shipped_model_of_its_name(path: str) -> None:
    with pytest.raises(ProfileError) as error:
        load_model(path)
    assert str(error.value) == (
        f"{path} is not a YAML, a config.json or the folder of a checkpoint, or does not exist; names of shipped "
        "models: 'fcp list models'"
    )


def _document(**changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((shipped("profiles") / "models" / "qwen3-8b.yaml").read_text())
    document["text"].update(changes)
    return document


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 7}, "num_kv_heads 7 does not divide num_heads 32"),
        ({"head_dim": 127}, "head_dim 127 is odd"),
        ({"num_layers": 0}, "text.num_layers is 0; it must be a whole number of at least 1"),
        ({"num_layers": 36.5}, "text.num_layers is 36.5"),
        ({"hidden_size": True}, "text.hidden_size is True"),
        ({"ffn_size": None}, "ffn_size is missing, and layers have no experts"),
        ({"qk_norm": 1}, "text.qk_norm is 1; it must be true or false"),
        ({"fnn_size": 3}, "unknown key text.fnn_size; did you mean text.ffn_size?"),
        ({"norm_eps": float("nan")}, "text.norm_eps is nan; it must be a finite number"),
    ],
)
def test_figures_that_cannot_be_are_rejected_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(_document(**changes)))
    with pytest.raises(ProfileError, match=message.replace("?", r"\?")):
        load_model(path)


def test_an_architecture_of_no_family_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump({**_document(), "architecture": "mamba"}))
    with raises(
        snapshot(
            "ProfileError: FOLDER/model.yaml: architecture is 'mamba'; it must be one of bamba, deepseek_v3, gemma3, gemma3_text, gemma4, gemma4_text, glm4_moe, glm4_moe_lite, gpt_oss, internvl, llama, mimo_v2_flash, minimax_m2, nemotron_h, qwen2, qwen2_5_vl, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next, qwen3_vl, qwen3_vl_moe"
        )
    ):
        load_model(path)


def test_a_vision_tower_that_feeds_another_width_is_rejected(tmp_path: Path) -> None:
    document = yaml.safe_load((shipped("profiles") / "models" / "qwen3-vl-8b.yaml").read_text())
    document["vision"]["out_hidden_size"] = 2048
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(document))
    with raises(
        snapshot("ProfileError: FOLDER/model.yaml: vision.out_hidden_size 2048 differs from text.hidden_size 4096")
    ):
        load_model(path)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            snapshot(
                "ProfileError: FOLDER/config.json: model_type is 'mamba'; known: bamba, deepseek_v3, gemma3_text, gemma4_text, glm4_moe, glm4_moe_lite, gpt_oss, llama, mimo_v2_flash, minimax_m2, mistral, nemotron_h, qwen2, qwen2_5_vl_text, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, qwen3_vl_moe_text, qwen3_vl_text"
            ),
        ),
        (
            {"num_attention_heads": 30, "head_dim": None},
            snapshot(
                "ProfileError: FOLDER/config.json: head_dim is missing and hidden_size 4096 is not divisible by num_attention_heads 30"
            ),
        ),
        (
            {"num_key_value_heads": 5},
            snapshot("ProfileError: FOLDER/config.json: num_kv_heads 5 does not divide num_heads 32"),
        ),
        (
            {"vocab_size": None},
            snapshot("ProfileError: FOLDER/config.json: vocab_size is missing"),
        ),
    ],
)
def test_a_contradictory_configuration_is_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_hf_config(**changes)))
    with raises(message):
        load_model(path)


def test_a_file_that_is_no_model_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("format: fcp-cluster/1\n")
    with raises(
        snapshot(
            "ProfileError: FOLDER/model.yaml is not a model description: expected 'format: fcp-model/1', found 'fcp-cluster/1'"
        )
    ):
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"full_attention_layers": [7, 32]},
            snapshot(
                "ProfileError: FOLDER/model.yaml: vision.full_attention_layers [7, 32] has blocks beyond vision.depth 32"
            ),
        ),
        (
            {"window_size": 27},
            snapshot("ProfileError: FOLDER/model.yaml: vision.window_size 27 is smaller than merge_size x patch_size"),
        ),
        (
            {"image_size": 448},
            snapshot(
                "ProfileError: FOLDER/model.yaml: vision.image_size is 448; kinds but qwen2_5_vl and gemma4 have a table of positions in a square, and need it"
            ),
        ),
    ],
)
def test_a_tower_with_windows_that_cannot_be_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    document = yaml.safe_load((shipped("profiles") / "models" / "qwen2.5-vl-7b.yaml").read_text())
    document["vision"] |= changes
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(document))
    with raises(message):
        load_model(tmp_path / "model.yaml")


def test_deepstack_beyond_the_tower_is_rejected(tmp_path: Path) -> None:
    document = yaml.safe_load((shipped("profiles") / "models" / "qwen3-vl-8b.yaml").read_text())
    document["vision"]["deepstack_layers"] = [8, 27]
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(document))
    with raises(
        snapshot("ProfileError: FOLDER/model.yaml: vision.deepstack_layers [8, 27] has blocks beyond vision.depth 27")
    ):
        load_model(path)
