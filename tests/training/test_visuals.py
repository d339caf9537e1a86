"""The bundled trainer on made-up images and clips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from inline_snapshot import snapshot

from benchmarks.clips import Scale, write_media_records
from fcp_cli.errors import RunError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.tokens import open_media
from fcp_cli.util.files import shipped
from fcp_cli.vision.processors import open_processor
from tests.manifest.datasets import build, write_jsonl
from tests.messages import raises
from tests.training.small_runs import write_small_plan

pytest.importorskip("transformers")

from fcp_cli.training.pictures import SyntheticVisuals
from fcp_cli.training.train import main
from fcp_cli.training.weights import build_model, model_config
from tests.runtime.vision_families import FAMILIES

pytestmark = [pytest.mark.torch, pytest.mark.hf]

ROWS = 12


def manifest_of(folder: Path, processor: str = "qwen3-vl", *, fps: float | None = None) -> Path:
    scale = Scale(short_side=32, frames_per_second=fps)
    write_media_records(folder / "sizes.jsonl", "mixed", ROWS, seed=1, scale=scale)
    build(folder / "sizes.jsonl", folder / "lengths.parquet", kind="media", processor=processor)
    return folder / "lengths.parquet"


def visuals(manifest: Path, model: str = "qwen3-vl-tiny") -> SyntheticVisuals:
    records = open_media(manifest)
    assert records is not None
    return SyntheticVisuals(records, read_manifest(manifest).length_tokens, model_config(model), seed=0)


@pytest.mark.parametrize(
    ("processor", "model"),
    [("qwen3-vl", "qwen3-vl-tiny"), ("qwen2.5-vl", "qwen2.5-vl-7b"), ("internvl", "internvl3-2b")],
)
def test_made_up_sequences_have_the_tokens_and_patches_of_the_manifest(
    processor: str, model: str, tmp_path: Path
) -> None:
    manifest = manifest_of(tmp_path, processor)
    fetch, table = visuals(manifest, model), read_manifest(manifest)
    assert table.vision_patches is not None
    for row in range(ROWS):
        sequence = fetch(row)
        assert len(sequence.tokens) == len(sequence.labels) == table.length_tokens[row]
        assert sum(part.grid[0] * part.grid[1] for part in sequence.parts) == table.vision_patches[row]
        assert (sequence.labels == -100).sum() == sum(part.num_tokens for part in sequence.parts)


def test_a_row_is_the_same_on_every_rank_and_its_pixels_are_those_of_its_part(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    one, other = visuals(manifest)(4), visuals(manifest)(4)
    assert np.array_equal(one.tokens, other.tokens)
    assert one.parts
    for part, again in zip(one.parts, other.parts, strict=True):
        assert part.pixels().shape == (part.grid[0] * part.grid[1], 3 * 2 * 16 * 16)
        assert torch.equal(part.pixels(), again.pixels())


OTHER_FAMILIES: dict[str, tuple[str, str]] = {
    "InternVL's sizes for Qwen3-VL": ("internvl", "qwen3-vl-tiny"),
    "Qwen3-VL's sizes for Qwen2.5-VL": ("qwen3-vl", "qwen2.5-vl-7b"),
    "Qwen3-VL's sizes for InternVL": ("qwen3-vl", "internvl3-2b"),
}
OTHER_FAMILIES_MESSAGES = snapshot(
    {
        "InternVL's sizes for Qwen3-VL": "RunError: FOLDER/sizes.jsonl was counted with the processor internvl, but the model is of the family qwen3-vl; build the manifest again with --processor qwen3-vl",
        "Qwen3-VL's sizes for Qwen2.5-VL": "RunError: FOLDER/sizes.jsonl was counted with the processor qwen3-vl, but the model is of the family qwen2.5-vl; build the manifest again with --processor qwen2.5-vl",
        "Qwen3-VL's sizes for InternVL": "RunError: FOLDER/sizes.jsonl was counted with the processor qwen3-vl, but the model is of the family internvl; build the manifest again with --processor internvl",
    }
)


@pytest.mark.parametrize("case", OTHER_FAMILIES)
def test_a_manifest_of_another_family_is_refused(tmp_path: Path, case: str) -> None:
    processor, model = OTHER_FAMILIES[case]
    with raises(OTHER_FAMILIES_MESSAGES[case]):
        visuals(manifest_of(tmp_path, processor), model)


def run(folder: Path, *words: str, model: str = "qwen3vl-tiny") -> list[dict[str, Any]]:
    """The step records of a run of one rank, in this process."""
    plan = write_small_plan(folder / "plan.parquet", folder / "lengths.parquet", steps=1, num_ranks=1)
    arguments = ["--plan", str(plan), "--manifest", str(folder / "lengths.parquet"), "--run-dir", str(folder / "run")]
    assert main([*arguments, "--model", model, "--device", "cpu", *words]) == 0
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


@pytest.mark.parametrize(
    "words", [(), ("--freeze-vision", "--recompute", "full")], ids=["trained", "frozen, recomputed"]
)
def test_the_tiny_model_trains_on_images_and_clips(words: tuple[str, ...], tmp_path: Path) -> None:
    manifest_of(tmp_path)
    (step,) = run(tmp_path, *words, "--learning-rate", "1e-2", "--warmup-steps", "0")
    assert_learns(step)


def write_tiny(folder: Path, architecture: str, kind: str, images: dict[str, Any]) -> str:
    """A description of a small model with one encoder block, and its processor of images of 56 pixels."""
    document = yaml.safe_load((shipped("profiles") / "models" / "qwen3-vl-tiny.yaml").read_text())
    tower: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "ffn_size": 16,
        "out_hidden_size": 128,
        "merge_size": 2,
    }
    tower |= {"kind": kind, "patch_size": 14, "temporal_patch_size": 1, "image_size": 56}
    document |= {"name": "tiny", "aliases": [], "architecture": architecture, "vision": tower}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(document))
    settings = {"image_processor": {"size": {"height": 56, "width": 56}, **images}, "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return str(folder / "tiny.yaml")


def build_sizes(folder: Path, records: list[dict[str, Any]]) -> Path:
    """The manifest of sizes as the folder's processor counts them."""
    source = write_jsonl(folder / "sizes.jsonl", records)
    build(source, folder / "lengths.parquet", kind="media", processor=str(folder))
    return folder / "lengths.parquet"


def assert_learns(step: dict[str, Any]) -> None:
    assert 0 < step["loss"] < 8 and step["grad_norm"] > 0


def test_a_small_internvl_trains_on_the_same_sizes(tmp_path: Path) -> None:
    images = {"min_patches": 1, "max_patches": 4, "crop_to_patches": True}
    model = write_tiny(tmp_path, "internvl", "internvit", {"image_processor_type": "GotOcr2ImageProcessor", **images})
    manifest_of(tmp_path, str(tmp_path), fps=0.5)
    (step,) = run(tmp_path, model=model)
    assert_learns(step)


def test_a_small_gemma_trains_on_images_and_their_crops(tmp_path: Path) -> None:
    images = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10}
    model = write_tiny(tmp_path, "gemma3", "siglip", {"image_processor_type": "Gemma3ImageProcessor", **images})
    sizes = [{"height": 30, "width": 40 + 20 * row} for row in range(ROWS)]
    build_sizes(tmp_path, [{"text_tokens": 9, "images": [size]} for size in sizes])
    (step,) = run(tmp_path, model=model)
    assert_learns(step)


def test_a_frozen_encoder_has_nothing_to_train() -> None:
    built: Any = build_model("qwen3-vl-tiny", seed=0, device=torch.device("cpu"), freeze_vision=True)
    trained = {name.split(".")[1] for name, parameter in built.named_parameters() if parameter.requires_grad}
    assert trained == {"language_model"}
    assert not any(parameter.requires_grad for parameter in built.base_model.visual.parameters())


def write_gemma4(folder: Path) -> str:
    """The configuration of a small Gemma 4 with its encoder, for the bytes of texts."""
    text: dict[str, Any] = {"vocab_size": 300, "vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 0}
    config = FAMILIES["gemma4"].config(**text)
    config.vision_config.position_embedding_size = 160
    config.image_token_id, config.video_token_id, config.audio_token_id = 290, 291, 292
    (folder / "gemma4").mkdir()
    (folder / "gemma4" / "config.json").write_text(config.to_json_string(use_diff=False))
    return str(folder / "gemma4")


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma4"])
def test_a_vision_model_on_text_alone_freezes_its_encoder(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "ab" * n} for n in range(1, ROWS + 1)])
    build(texts, tmp_path / "lengths.parquet", kind="jsonl")
    model = "qwen3vl-tiny" if family == "qwen3-vl" else write_gemma4(tmp_path)
    assert len(run(tmp_path, model=model)) == 1
    assert f"the vision encoder of {model} is frozen" in capsys.readouterr().err


def test_a_gemma4_trains_on_images_of_any_shape(tmp_path: Path) -> None:
    images = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 2, "pooling_kernel_size": 2}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {**images, "max_soft_tokens": 70}}))
    sizes = [{"height": 3 + 5 * row, "width": 40} for row in range(ROWS)]
    records = [{"text_tokens": 9, "images": [size] * (row % 3)} for row, size in enumerate(sizes)]
    manifest = build_sizes(tmp_path, records)
    model = write_gemma4(tmp_path)
    fetch = visuals(manifest, model)
    for row, size in enumerate(sizes):
        grid = open_processor(str(tmp_path)).image(size["height"], size["width"]).grid
        assert [part.grid for part in fetch(row).parts] == [grid[1:]] * (row % 3)
    (step,) = run(tmp_path, model=model)
    assert_learns(step)


def test_a_gemma4_refuses_images_that_another_processor_counted(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    with pytest.raises(
        RunError, match="but the model is of the family gemma4; build the manifest again with --processor"
    ):
        visuals(manifest, write_gemma4(tmp_path))
