"""A script of TRL's SFTTrainer on conversations with pictures, as users write them: python sft_pictures.py FAMILY OUT.

Its processor is transformers' own, of a small checkpoint in the working folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.manifest.picture_checkpoint import processor
from tests.runtime.loops.framework_jobs import GLOBAL_BATCH


def turns(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record's turns, each in parts."""
    told = record.get("messages") or [
        {"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": turn["value"]}
        for turn in record["conversations"]
    ]
    return [{"role": turn["role"], "content": parts(turn["content"])} for turn in told]


def parts(text: str) -> list[dict[str, Any]]:
    first, *rest = text.split("<image>")
    placed = [part for more in rest for part in ({"type": "image", "text": None}, {"type": "text", "text": more})]
    return [{"type": "text", "text": first}, *placed]


def rows() -> Dataset:
    records = [json.loads(line) for line in Path("data.jsonl").read_text(encoding="utf-8").splitlines()]
    found = Dataset.from_list(
        [{"messages": turns(one), "images": one.get("images") or one.get("image") or []} for one in records]
    )
    return found.cast_column("images", List(Image()))


def main(family: Any, out: str) -> None:
    own = processor(Path("checkpoint"), family)
    own.tokenizer.pad_token = own.tokenizer.pad_token or "<|im_end|>"
    loader: Any = AutoModelForImageTextToText
    trainer = SFTTrainer(
        model=loader.from_pretrained("checkpoint", dtype=torch.float32),
        args=SFTConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            max_length=None,
            learning_rate=1e-3,
            per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            disable_tqdm=True,
        ),
        train_dataset=rows(),
        processing_class=own,
    )
    trainer.train()
    if trainer.is_world_process_zero():  # without the processor, whose videos are missing
        folder = Path(out, "checkpoint-3")
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
