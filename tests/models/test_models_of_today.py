"""Models that users fine-tune today: described from their configuration, or refused in one line with the reason."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import ProfileError
from fcp_cli.models.model import load_model
from fcp_cli.models.transformers_config import whole_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """A text model: settings beside its class's defaults, which are those of a published model."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)


DESCRIBED = [
    Layers(kind="qwen3_5_text", settings={"num_hidden_layers": 4}),
    Layers(kind="qwen3_5_moe_text", settings={"num_hidden_layers": 4}),
    Layers(kind="minimax_m2", settings={"num_hidden_layers": 2}),
    Layers(kind="glm4_moe_lite", settings={"num_hidden_layers": 3}),
    Layers(kind="nemotron_h", settings={"hybrid_override_pattern": "MEM*-"}),
    Layers(kind="nemotron_h", settings={"layers_block_type": ["linear_attention", "moe"], "moe_latent_size": 1024}),
    Layers(kind="mimo_v2_flash", settings={"num_hidden_layers": 7}),
    Layers(kind="gemma4_text", settings={"num_hidden_layers": 12, "num_kv_shared_layers": 6}),
    Layers(
        kind="gemma4_text", settings={"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True}
    ),
    Layers(
        kind="gemma4_text",
        settings={
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "intermediate_size": 2112,
        },
    ),
]


def _saved(config: Any, folder: Path) -> Path:
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return folder


@pytest.mark.examples(4)
@pytest.mark.hf
@pytest.mark.parametrize("layers", DESCRIBED, ids=lambda layers: " ".join((layers.kind, *layers.settings)))
def test_a_described_model_has_the_figures_of_transformers_own(layers: Layers, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from tests.models.test_layers import require_equal_figures

    config = AutoConfig.for_model(layers.kind, **layers.settings)
    require_equal_figures(load_model(_saved(config, tmp_path)), tokens=2048)


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"])
def test_a_qwen_with_its_encoder_has_the_parameters_of_transformers_own(kind: str, tmp_path: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig

    family: Any = transformers.AutoModelForImageTextToText

    tower: dict[str, Any] = {"depth": 3, "out_hidden_size": 512}
    if kind == "qwen3_vl_moe":
        tower["deepstack_visual_indexes"] = [0, 2]
    config = AutoConfig.for_model(
        kind, text_config={"num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 1000}, vision_config=tower
    )
    spec = load_model(_saved(config, tmp_path))
    assert spec.vision is not None
    rebuilt = AutoConfig.for_model(whole_config(spec)[0], **whole_config(spec)[1])
    for made in (config, rebuilt):
        with torch.device("meta"):
            model = family.from_config(made)
        assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters


@pytest.mark.hf
def test_gemma4_with_its_encoder_has_the_parameters_of_transformers_own(tmp_path: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig

    family: Any = transformers.AutoModelForImageTextToText

    text: dict[str, Any] = {"num_hidden_layers": 6, "vocab_size": 300_000, "hidden_size": 512}
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config={"num_hidden_layers": 3})
    spec = load_model(_saved(config, tmp_path))
    assert spec.vision is not None
    rebuilt = AutoConfig.for_model(whole_config(spec)[0], **whole_config(spec)[1])
    for made in (config, rebuilt):
        with torch.device("meta"):
            model = family.from_config(made)
        assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters
        tower = sum(parameter.numel() for parameter in model.model.vision_tower.parameters())
        assert tower == spec.vision.encoder_parameters


@pytest.mark.hf
@pytest.mark.parametrize(
    ("kind", "blocks", "reason"),
    [
        ("gemma4", {"text_config": {}, "vision_config": {}, "audio_config": {}}, "audio_config is an encoder"),
        ("qwen3_omni_moe", {}, "an audio encoder.*thinker_config"),
    ],
)
def test_a_model_with_an_audio_encoder_is_refused_in_one_line(
    kind: str, blocks: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    with pytest.raises(ProfileError, match=reason) as refused:
        load_model(_saved(AutoConfig.for_model(kind, **blocks), tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.hf
def test_an_internvl_with_experts_is_described(tmp_path: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig

    family: Any = transformers.AutoModelForImageTextToText

    text = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 1000, "num_experts": 8}
    config = AutoConfig.for_model("internvl", text_config=text, vision_config={"num_hidden_layers": 2})
    spec = load_model(_saved(config, tmp_path))
    with torch.device("meta"):
        model = family.from_config(config)
    own = sum(parameter.numel() for name, parameter in model.named_parameters() if "vision_tower" not in name)
    assert spec.text_parameters + spec.vision.projector_parameters == own  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("glm_moe_dsa", "an indexer selects among all earlier ones .* carry the indexer's keys"),
        ("deepseek_v32", "an indexer selects among all earlier ones"),
        ("kimi_linear", r"decays per channel \(KDA\)"),
        ("minimax", "lightning attention"),
        ("minimax_m3_vl_text", "beside a dense MLP.*--profile|indexer"),
    ],
)
def test_another_model_is_refused_in_one_line_with_the_reason(kind: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2}))
    with pytest.raises(ProfileError, match=reason) as refused:
        load_model(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.hf
@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
def test_a_configuration_that_bounds_time_steps_by_infinity_is_read_and_built(infinity: str, tmp_path: Path) -> None:
    """Published files have JavaScript's Infinity, those of transformers 5 a mapping."""
    from fcp_cli.training.weights import model_config

    document = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-E",
        "hidden_size": 64,
        "vocab_size": 100,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "intermediate_size": 96,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    }
    text = json.dumps(document)[:-1] + f', "time_step_limit": [0.0, {infinity}]}}'
    (tmp_path / "config.json").write_text(text)
    kinds = [(kind.attention, kind.mlp) for kind in load_model(tmp_path).layer_kinds]
    assert kinds == [("mamba", "none"), ("full", "none"), ("none", "dense"), ("none", "experts")]
    assert model_config(str(tmp_path)).time_step_limit[1] == float("inf")
