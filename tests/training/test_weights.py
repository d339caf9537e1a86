"""Checkpoints of Hugging Face: what is read is what was saved, what is written reloads bit for bit."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.models.weights import find_weights, has_weights
from fcp_cli.runs.run_dir import note_links
from fcp_cli.training.weights import build_model, export_model, load_weights, match_weights, unexpected_weights
from tests.messages import raises
from tests.runtime.launch import torchrun
from tests.training.test_models import write_config

pytestmark = [pytest.mark.hf, pytest.mark.torch]

CPU = torch.device("cpu")


def built(name: str, seed: int) -> Any:
    return build_model(name, seed=seed, device=CPU)


def saved(folder: Path, name: str = "qwen3-tiny", **options: Any) -> Any:
    """A checkpoint that transformers wrote, and the model in it."""
    model = built(name, seed=1)
    model.save_pretrained(folder, **options)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(state(found), state(expected), rtol=0, atol=0)


def load(model: nn.Module, folder: Path) -> dict[str, str]:
    weights = find_weights(folder)
    names = match_weights(model, weights)
    load_weights(model, weights, names)
    return names


def reloaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads((folder / "config.json").read_text())
    family: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    return family.from_pretrained(folder, dtype="auto")


def export(model: Any, folder: Path, **options: Any) -> None:
    arguments = {"rank": 0, "num_ranks": 1, "barrier": lambda: None, "dtype": torch.float32, **options}
    export_model(model, folder, **arguments)


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-vl-tiny"])
def test_a_checkpoint_of_several_files_is_read_bit_for_bit(tmp_path: Path, name: str) -> None:
    expected = saved(tmp_path, name, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = built(name, seed=2)
    names = load(model, tmp_path)
    assert_same(model, expected)
    assert unexpected_weights(names, find_weights(tmp_path), model) == []


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-vl-tiny"])
def test_an_export_reloads_bit_for_bit_in_transformers(tmp_path: Path, name: str) -> None:
    model = built(name, seed=3)
    export(model, tmp_path / "model")
    again = reloaded(tmp_path / "model")
    assert_same(again, model)
    assert type(again).__name__ == type(model).__name__


def test_tied_weights_are_read_under_either_name_and_written_once(tmp_path: Path) -> None:
    config = write_config(tmp_path, tie_word_embeddings=True)
    model = built(config, seed=1)
    export(model, tmp_path / "model")
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    again = built(config, seed=2)
    load(again, tmp_path / "model")
    assert_same(again, model)


def test_weights_are_cast_to_the_types_of_the_model(tmp_path: Path) -> None:
    model = built("qwen3-tiny", seed=1)
    export(model, tmp_path / "model", dtype=torch.bfloat16)
    assert reloaded(tmp_path / "model").dtype == torch.bfloat16
    again = built("qwen3-tiny", seed=2)
    load(again, tmp_path / "model")
    assert_same(again, model.to(torch.bfloat16).float())


def test_tokenizer_and_processor_go_along_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_mine.py"):
        (source / name).write_text("{}")
    export(built("qwen3-tiny", seed=1), tmp_path / "model", source=source)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip


@pytest.mark.processes
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "shards"),
    [pytest.param(3, 3, id="sharded"), pytest.param(4, 2, id="copies of shards", marks=pytest.mark.full)],
)
def test_ranks_read_their_rows_and_write_files_of_their_own(tmp_path: Path, ranks: int, shards: int) -> None:
    expected = saved(tmp_path / "source")
    program = ("-m", "tests.training.workers.weights_worker")
    torchrun(*program, str(tmp_path / "source"), str(tmp_path / "model"), str(shards), num_ranks=ranks)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert_same(reloaded(tmp_path / "model"), expected)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_of_configuration_alone_has_no_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert not has_weights(tmp_path)
    with raises(
        snapshot(
            "RunError: FOLDER holds no model.safetensors; give a checkpoint's folder with --weights, or --weights random"
        )
    ):
        find_weights(tmp_path)


def test_pickled_weights_are_refused_with_the_command_that_converts_them(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(RunError) as caught:
        find_weights(tmp_path)
    message = str(caught.value).replace(str(tmp_path), "FOLDER")
    assert message == snapshot(
        'FOLDER holds no model.safetensors; pytorch_model.bin is a pickle, which may run code; write safetensors beside it with: python -c \'import transformers; transformers.Qwen3ForCausalLM.from_pretrained("FOLDER", dtype="auto").save_pretrained("FOLDER")\''
    )
    *_, code = shlex.split(str(caught.value).partition(" with: ")[2])
    exec(code)
    assert_same(reloaded(tmp_path), model)


@pytest.mark.parametrize("keep", [3, 100, 20_000])
def test_a_truncated_file_is_one_line(tmp_path: Path, keep: int) -> None:
    saved(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(RunError, match=r"model\.safetensors is truncated or damaged \(.*\); copy it again$") as caught:
        find_weights(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_the_index_names_and_nobody_copied_is_one_line(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="200KB")
    gone = sorted(tmp_path.glob("model-0*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(RunError, match=rf"{gone.name} is missing; copy the checkpoint again$"):
        find_weights(tmp_path)


def test_another_models_weights_are_one_line(tmp_path: Path) -> None:
    saved(tmp_path)
    with raises(
        snapshot(
            "RunError: FOLDER/model.safetensors: 'model.embed_tokens.weight' is (256, 128), but the model's is (64, 32); give the checkpoint of this model"
        )
    ):
        load(built(write_config(tmp_path, tie_word_embeddings=True), seed=0), tmp_path)


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"has no weights for 'model\.layers\.0\..*' \(\d+ tensors missing\); give the"):
        load(model, tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = saved(tmp_path)
    tensors = {
        name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="a quantised type, which is not trained; give a checkpoint in bfloat16 or"):
        load(model, tmp_path)


def test_a_kill_while_writing_leaves_the_export_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = built("qwen3-tiny", seed=1), built("qwen3-tiny", seed=2)
    export(first, tmp_path / "model")
    monkeypatch.setattr("fcp_cli.training.weights.copy_companions", lambda *_: sys.exit(9))
    with pytest.raises(SystemExit):
        export(second, tmp_path / "model")
    monkeypatch.undo()
    assert_same(reloaded(tmp_path / "model"), first)
    export(second, tmp_path / "model")
    assert_same(reloaded(tmp_path / "model"), second)


def test_an_export_follows_a_link_of_the_run_and_no_other(tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "scratch" / "theirs"
    run.mkdir()
    theirs.mkdir(parents=True)
    (run / "model").symlink_to(theirs)
    model = built("qwen3-tiny", seed=1)
    export(model, run / "model")
    assert_same(reloaded(theirs), model)
    with pytest.raises(RunError, match="this run did not write"):
        export(model, run / "model")
    note_links(run)
    export(model, run / "model")
    assert (run / "model").is_symlink()
