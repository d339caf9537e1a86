from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fcp_cli.errors import ProfileError
from fcp_cli.models.model import load_model
from fcp_cli.training.weights import build_model

pytestmark = pytest.mark.hf

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def write_config(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def test_the_tiny_model_has_the_parameters_that_its_description_counts() -> None:
    built = build_model("qwen3-tiny", seed=0, device=CPU)
    assert sum(parameter.numel() for parameter in built.parameters()) == load_model("qwen3-tiny").parameters
    assert type(built).__name__ == "Qwen3ForCausalLM"


def test_equal_seeds_give_equal_weights() -> None:
    first, same, other = (build_model("qwen3-tiny", seed=seed, device=CPU) for seed in (1, 1, 2))
    weights = [model.state_dict()["model.layers.1.mlp.up_proj.weight"] for model in (first, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_hugging_face_config_is_built_as_it_stands(tmp_path: Path) -> None:
    name = write_config(tmp_path)
    built = build_model(name, seed=0, device=CPU)
    assert type(built).__name__ == "LlamaForCausalLM"
    assert sum(parameter.numel() for parameter in built.parameters()) == load_model(name).parameters
    assert load_model(name).vocab_size == 64


def test_a_model_with_sliding_windows_is_built(tmp_path: Path) -> None:
    name = write_config(tmp_path, model_type="qwen3", head_dim=8, use_sliding_window=True, sliding_window=8,
                        max_window_layers=1)  # fmt: skip
    model: Any = build_model(name, seed=0, device=CPU)
    assert "sliding_attention" in model.config.layer_types


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-vl-tiny"])
def test_what_memory_holds_before_weights_are_read_does_not_matter(name: str) -> None:
    torch.use_deterministic_algorithms(True)  # fills memory that nothing has written to with NaN
    try:
        built = build_model(name, seed=0, device=torch.device("cpu"), is_filled=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(parameter.isnan().any() for parameter in built.parameters())


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ProfileError, match="unknown model 'qwen3-tiney'; nearest: qwen3-tiny"):
        build_model("qwen3-tiney", seed=0, device=CPU)
