"""Numbers of a model that mean nothing: each is refused with its name and the largest that it can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import ProfileError
from fcp_cli.models.model import load_model
from fcp_cli.util.files import shipped

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 80_000_000, "num_layers is 80000000; it must be .* at most 10000$"),
        ("hidden_size", 2**40, "hidden_size is 1099511627776; it must be .* at most 1048576$"),
        ("intermediate_size", 2**40, "ffn_size is 1099511627776; it must be .* at most 1048576$"),
        ("num_attention_heads", 2**40, "num_heads is 1099511627776; it must be .* at most 65536$"),
        ("num_key_value_heads", 2**62, "num_kv_heads is .*; it must be .* at most 65536$"),
        ("vocab_size", 2**50, "vocab_size is 1125899906842624; it must be .* at most 16777216$"),
        ("head_dim", 2**30, "head_dim is 1073741824; it must be .* at most 1048576$"),
    ],
)
def test_a_figure_beyond_its_meaning_is_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    with pytest.raises(ProfileError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "other": {"rope_type": "dynamic"}}},
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}},
    ],
)
def test_a_rotation_that_grows_with_the_longest_position_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | settings))
    with pytest.raises(
        ProfileError,
        match=r"depends on the longest position on a rank, so it cannot follow a plan; choose another, such as",
    ):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3", "default", None])
def test_other_rotations_are_taken(tmp_path: Path, kind: str | None) -> None:
    equal = {"short_factor": [2.0], "long_factor": [2.0], "rope_type": "longrope"}
    for settings in ({"rope_scaling": kind and {"rope_type": kind, "factor": 2.0}}, {"rope_parameters": equal}):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | settings))
        load_model(tmp_path)


def test_every_whole_number_of_a_description_has_a_bound_of_its_own(tmp_path: Path) -> None:
    text = (shipped("profiles") / "models" / "qwen3-vl-8b.yaml").read_text(encoding="utf-8")
    lines = text.splitlines()
    numbers = [at for at, line in enumerate(lines) if line.partition(": ")[2].strip().isdigit()]
    assert len(numbers) > 15
    for at in numbers:
        changed = [*lines[:at], f"{lines[at].partition(': ')[0]}: {2**40}", *lines[at + 1 :]]
        (tmp_path / "model.yaml").write_text("\n".join(changed), encoding="utf-8")
        with pytest.raises(ProfileError, match="at most"):
            load_model(tmp_path / "model.yaml")


@pytest.mark.lengthy
def test_a_million_attention_layers_of_a_hybrid_are_looked_up_at_once(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "bamba", "num_hidden_layers": 10_000, "attn_layer_indices": [10**6] * 1_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ProfileError):  # without its states it is no Bamba; a list would be searched for minutes
        load_model(tmp_path)
