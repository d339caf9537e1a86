"""Fine-tuning Qwen2.5-VL on images and clips: the losses of one unmodified model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from fcp_cli.files import shipped
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.synth import Scale, write_media_records
from fcp_cli.manifest.tokens import open_media
from fcp_cli.plan.reader import PlanReader
from fcp_cli.runs.metrics_reader import read_metrics
from fcp_cli.training.models import model_config
from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.visuals import SyntheticVisuals
from fcp_cli.vision.processors import Visual
from tests.manifest.datasets import build
from tests.training.small_runs import run_fcp, write_small_plan

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.hf, pytest.mark.processes, pytest.mark.torch]

STEPS = 10
LEARNING_RATE = 1e-3


def write_data(folder: Path) -> None:
    """A checkpoint of a tiny Qwen2.5-VL with its processor's settings, sizes, their manifest and a plan."""
    from transformers import AutoModelForImageTextToText

    (folder / "model.yaml").write_text(yaml.safe_dump(_description()))
    torch.manual_seed(1)
    family: Any = AutoModelForImageTextToText
    family.from_config(model_config(str(folder / "model.yaml"))).save_pretrained(folder / "checkpoint")
    images: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    images |= {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 784, "max_pixels": 50_176}
    (folder / "checkpoint" / "preprocessor_config.json").write_text(json.dumps(images))
    scale = Scale(short_side=56, frames_per_second=0.5)
    write_media_records(folder / "sizes.jsonl", "mixed", 24, seed=3, scale=scale, advance=lambda done: None)
    build(folder / "sizes.jsonl", folder / "lengths.parquet", kind="media", processor=str(folder / "checkpoint"))
    write_small_plan(folder / "plan.parquet", folder / "lengths.parquet", steps=STEPS)


def _description() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((shipped("profiles") / "models" / "qwen2.5-vl-7b.yaml").read_text())
    text = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
    # Pictures of 4 to 16 patches a side have windows of 16 patches, whole and cut.
    tower: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2, "ffn_size": 24, "out_hidden_size": 32}
    tower |= {"window_size": 56, "full_attention_layers": [1]}
    document["text"] |= text | {"vocab_size": 512}
    document["vision"] |= tower
    return document | {"name": "qwen2.5-vl-small", "aliases": []}


def _grids(visuals: Sequence[Visual]) -> Tensor:
    return torch.tensor([visual.grid for visual in visuals])


def _pictures(folder: Path, fetch: SyntheticVisuals, row: int) -> dict[str, Any]:
    """The arguments of the unmodified model for a row's images and videos."""
    records = open_media(folder / "lengths.parquet")
    assert records is not None
    images, videos = records(row)
    pixels = {
        kind: [part.pixels().double() for part in fetch(row).parts if part.kind == kind] for kind in ("image", "video")
    }
    found: dict[str, Any] = {}
    if images:
        found |= {"pixel_values": torch.cat(pixels["image"]), "image_grid_thw": _grids(images)}
    if videos:
        found |= {"pixel_values_videos": torch.cat(pixels["video"]), "video_grid_thw": _grids(videos)}
        found |= {"second_per_grid_ts": torch.tensor([video.part_seconds for video in videos], dtype=torch.float64)}
    return found


def losses_of_one_process(folder: Path) -> list[float]:
    """Train the checkpoint as transformers has it, encoder, windows and positions included, row after row."""
    from transformers import AutoModelForImageTextToText

    family: Any = AutoModelForImageTextToText
    model: Any = family.from_pretrained(folder / "checkpoint", dtype=torch.float64)
    settings = TrainSettings(
        plan=folder / "plan.parquet", model="", run_dir=folder, learning_rate=LEARNING_RATE, warmup_steps=1
    )
    optimizer = make_optimizer(list(model.parameters()), settings)
    records = open_media(folder / "lengths.parquet")
    assert records is not None
    lengths = read_manifest(folder / "lengths.parquet").length_tokens
    fetch = SyntheticVisuals(records, lengths, model.config, seed=settings.seed)
    losses = []
    for number, step in enumerate(PlanReader(folder / "plan.parquet").steps()):
        batch = [fetch(int(row)) for row in step.sequences]
        learned = sum(int((one.labels[1:] != -100).sum()) for one in batch)
        total = 0.0
        for row, one in zip(step.sequences, batch, strict=True):
            ids, labels = torch.from_numpy(one.tokens)[None], torch.from_numpy(one.labels)
            types = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
            pictures = _pictures(folder, fetch, int(row))
            logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **pictures).logits[0, :-1]
            loss = functional.cross_entropy(logits, labels[1:], reduction="sum") / learned
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        clip_gradients(list(model.parameters()), settings.max_grad_norm)
        set_learning_rate(optimizer, learning_rate_at(number, settings=settings, plan_steps=STEPS))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_ranks_learn_what_one_process_learns_from_images_and_clips(tmp_path: Path) -> None:
    write_data(tmp_path)
    words = ("--learning-rate", str(LEARNING_RATE), "--warmup-steps", "1", "--precision", "fp64", "--zero", "2")
    ended = run_fcp("launch", "--model", "checkpoint", *words, "--run-dir", "run", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"]
    expected = losses_of_one_process(tmp_path)
    assert len(found) == STEPS
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-12)
