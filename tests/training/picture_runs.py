"""Small vision-language checkpoints, conversations about pictures, and what one unmodified model learns of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.manifest.pictures import PictureRecords
from fcp_cli.manifest.tokens import open_pictures
from fcp_cli.plan.file import PlanReader
from fcp_cli.training.decoding import Decoder, Wanted
from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from fcp_cli.training.settings import TrainSettings
from fcp_cli.vision.processors import Qwen25Vision
from tests.manifest.datasets import build, write_jsonl
from tests.manifest.picture_checkpoint import (
    GEMMA_PATCH,
    GEMMA_POOLING,
    PATCH,
    TILE,
    TILE_TOKENS,
    Family,
    odd_sizes,
    picture,
    processor,
    write_clip,
    write_processor,
)
from tests.runtime.models import SMALL_DECODER
from tests.training.small_runs import NUM_RANKS, write_small_plan

ROWS = 24
LEARNING_RATE = 1e-3


def config(family: Family, tokenizer: Any) -> Any:
    """Of a model of two or three layers."""
    import transformers

    text = {
        "vocab_size": 288,
        **SMALL_DECODER,
        "head_dim": 8,
    }
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    if family == "internvl":
        return transformers.InternVLConfig(
            text_config={"model_type": "qwen2", **text},
            vision_config={
                "num_hidden_layers": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "image_size": [TILE, TILE],
                "patch_size": [4, 4],
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=TILE_TOKENS,
            tie_word_embeddings=False,
        )
    if family == "gemma4":
        return transformers.Gemma4Config(
            text_config={
                **text,
                "vocab_size_per_layer_input": 288,
                "hidden_size_per_layer_input": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 24,
                "global_head_dim": 16,
                "use_bidirectional_attention": "vision",
            },
            vision_config={
                "num_hidden_layers": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "pooling_kernel_size": GEMMA_POOLING,
                "patch_size": GEMMA_PATCH,
                "position_embedding_size": 160,
            },
            audio_config=None,
            image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<|audio>"),
            audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
            tie_word_embeddings=False,
        )
    kind: Any
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": 32,
    }
    if family == "qwen2_5_vl":  # windows of 16 patches, whole and cut
        kind, tower = transformers.Qwen2_5_VLConfig, {**tower, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    else:
        kind = transformers.Qwen3VLConfig
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return kind(
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config=tower,
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )


def write_vision_checkpoint(folder: Path, family: Family) -> Path:
    """Weights, tokenizer and processor, as `save_pretrained` leaves them."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    write_processor(folder, family)
    tokenizer: Any = AutoTokenizer
    model: Any = AutoModelForImageTextToText
    torch.manual_seed(1)
    made = model.from_config(config(family, tokenizer.from_pretrained(folder)))
    with torch.no_grad():
        for parameter in made.parameters():  # none zero or alike, as initialisation leaves some
            parameter.add_(0.05 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return folder


def write_conversations(folder: Path, *, clips: bool = False) -> list[dict[str, Any]]:
    """Of none to three images each, in the form of LLaVA and of chat by turns; of some a clip, where there are clips."""
    sizes, records, number = odd_sizes(3 * ROWS, 2), [], 0
    for row in range(ROWS):
        names = []
        for _ in range(row % 4):
            picture(*sizes[number], seed=number).save(folder / f"{number}.png")
            names.append(f"{number}.png")
            number += 1
        question, answer = f"<image> and {row}? " * len(names) + "Say.", "It is " + "so " * (row % 5)
        if clips and row % 4 == 1:  # beside its one image
            write_clip(folder / f"{row}.mp4", 6 + row, 40 + row, 64, 4)
            turns = [{"from": "human", "value": f"<video> or {question}"}, {"from": "gpt", "value": answer}]
            records.append({"conversations": turns, "image": names, "video": f"{row}.mp4"})
            continue
        if row % 2:
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            records.append({"conversations": turns, "image": names})
        else:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            records.append({"messages": turns, "images": names})
    write_jsonl(folder / "data.jsonl", records)
    return records


def write_run(
    folder: Path, family: Family, *, steps: int, num_ranks: int = NUM_RANKS, clips: bool = False
) -> list[dict[str, Any]]:
    """Checkpoint, conversations, manifest and plan."""
    write_vision_checkpoint(folder / "checkpoint", family)
    records = write_conversations(folder, clips=clips)
    build(folder / "data.jsonl", folder / "lengths.parquet", kind="media", processor=str(folder / "checkpoint"))
    write_small_plan(folder / "plan.parquet", folder / "lengths.parquet", steps=steps, num_ranks=num_ranks)
    return records


def processed(folder: Path, family: Family, record: Mapping[str, Any], own: Any) -> dict[str, Tensor]:
    """What transformers' processor makes of one conversation."""
    from PIL import Image

    turns = record.get("messages") or [
        {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
        for turn in record["conversations"]
    ]
    asked = turns[0]["content"].split("<image>")
    parts = [{"type": "text", "text": asked[0]}]
    for text in asked[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    turns = [{"role": "user", "content": parts}, *turns[1:]]
    images = [Image.open(folder / name) for name in record.get("images") or record.get("image") or []]
    text = own.apply_chat_template(turns, tokenize=False)
    found = own(text=[text], images=images or None, return_tensors="pt")
    return {name: value for name, value in found.items() if name != "attention_mask"}


def decoded(rows: PictureRecords, row: int, decode: Decoder, config: Any) -> dict[str, Tensor]:
    """What transformers' processor would make of a row with a clip: its video processors do not load everywhere.

    Where they load, the pixels that the decoder makes are theirs bit for bit (`test_decoding.py`).
    """
    found, pixels = rows.read(row), dict[str, list[Tensor]]()
    for one, size, visual in zip(found.pictures, found.sizes, found.visuals, strict=True):
        whole = visual.grid[0] * rows.processor.rows_per_part(visual)
        (values,) = decode(Wanted(picture=one, size=size, visual=visual, ranges=((0, whole),)))
        pixels.setdefault("video" if size.frames else "image", []).append(torch.from_numpy(values))
    pairs = list(zip(found.sizes, found.visuals, strict=True))
    ids = torch.from_numpy(found.encoded.tokens)[None]
    types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    inputs = {"input_ids": ids, "mm_token_type_ids": types}
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grids = [visual.grid for size, visual in pairs if bool(size.frames) == (kind == "video")]
        inputs |= {name: torch.cat(pixels[kind]), f"{kind}_grid_thw": torch.tensor(grids)}
    if isinstance(rows.processor, Qwen25Vision):
        seconds = [visual.part_seconds for size, visual in pairs if size.frames]
        inputs["second_per_grid_ts"] = torch.tensor(seconds, dtype=torch.float64)
    return inputs


def losses_of_one_process(
    folder: Path,
    family: Family,
    records: list[dict[str, Any]],
    *,
    frozen: bool = False,
    unlearned: Collection[int] = (),
) -> list[float]:
    """Train with transformers alone: its processor, its attention, one conversation after another.

    Of the rows in `unlearned` nothing is learned.
    """
    from transformers import AutoModelForImageTextToText

    loader: Any = AutoModelForImageTextToText
    model = loader.from_pretrained(folder / "checkpoint", dtype=torch.float64)
    if frozen:
        model.base_model.requires_grad_(False)
        model.base_model.language_model.requires_grad_(True)
    settings = TrainSettings(
        plan=folder / "plan.parquet", model="", run_dir=folder, learning_rate=LEARNING_RATE, warmup_steps=1
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained, settings)
    rows, own, losses = open_pictures(folder / "lengths.parquet"), processor(folder / "checkpoint", family), []
    assert rows is not None
    decode = Decoder(folder / "checkpoint", rows.processor)
    steps = list(PlanReader(folder / "plan.parquet").steps())
    for number, step in enumerate(steps):
        batch = [
            (
                decoded(rows, row, decode, model.config)
                if "video" in records[row]
                else processed(folder, family, records[row], own),
                rows(row),
            )
            for row in step.sequences.tolist()
        ]
        for (_, (_, labels)), row in zip(batch, step.sequences.tolist(), strict=True):
            if row in unlearned:
                labels[:] = -100
        learned = sum(int((labels[1:] != -100).sum()) for _, (_, labels) in batch)
        total = 0.0
        for inputs, (tokens, labels) in batch:
            assert inputs["input_ids"][0].tolist() == tokens.tolist()
            logits = model(**inputs, use_cache=False).logits[0, :-1]
            loss = functional.cross_entropy(logits, torch.from_numpy(labels)[1:], reduction="sum") / learned
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        clip_gradients(trained, settings.max_grad_norm)
        set_learning_rate(optimizer, learning_rate_at(number, settings=settings, plan_steps=len(steps)))
        optimizer.step()
        optimizer.zero_grad()
    return losses
