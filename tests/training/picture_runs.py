"""Small vision-language checkpoints, conversations about pictures, and what one unmodified model learns of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.manifest.tokens import open_pictures
from fcp_cli.plan.reader import PlanReader
from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer, set_learning_rate
from fcp_cli.training.settings import TrainSettings
from tests.manifest.datasets import build, write_jsonl
from tests.manifest.picture_checkpoint import (
    PATCH,
    TILE,
    TILE_TOKENS,
    Family,
    odd_sizes,
    picture,
    processor,
    write_processor,
)
from tests.training.small_runs import NUM_RANKS, write_small_plan

ROWS = 24
LEARNING_RATE = 1e-3


def config(family: Family, tokenizer: Any) -> Any:
    """Of a model of two or three layers."""
    import transformers

    text = {
        "vocab_size": 288,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
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
    return transformers.Qwen3VLConfig(
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": PATCH,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
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


def write_conversations(folder: Path) -> list[dict[str, Any]]:
    """Of none to three images each, in the form of LLaVA and of chat by turns."""
    sizes, records, number = odd_sizes(3 * ROWS, 2), [], 0
    for row in range(ROWS):
        names = []
        for _ in range(row % 4):
            picture(*sizes[number], seed=number).save(folder / f"{number}.png")
            names.append(f"{number}.png")
            number += 1
        question, answer = f"<image> and {row}? " * len(names) + "Say.", "It is " + "so " * (row % 5)
        if row % 2:
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            records.append({"conversations": turns, "image": names})
        else:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            records.append({"messages": turns, "images": names})
    write_jsonl(folder / "data.jsonl", records)
    return records


def write_run(folder: Path, family: Family, *, steps: int, num_ranks: int = NUM_RANKS) -> list[dict[str, Any]]:
    """Checkpoint, conversations, manifest and plan."""
    write_vision_checkpoint(folder / "checkpoint", family)
    records = write_conversations(folder)
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
    steps = list(PlanReader(folder / "plan.parquet").steps())
    for number, step in enumerate(steps):
        batch = [(processed(folder, family, records[row], own), rows(row)) for row in step.sequences.tolist()]
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
