"""Fine-tune a small decoder with transformers' Trainer, on rows of many lengths. Nothing in it knows of plans.

    torchrun --nproc-per-node 2 train.py                          # without a plan
    fcp launch --plan plan.parquet -- train.py                    # under one

`python train.py --prepare` writes the data set that the trainer trains on, for `fcp manifest build`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

VOCABULARY = 64


def rows() -> Dataset:
    draw = torch.Generator().manual_seed(7)
    lengths = [4 + int(40 * draw_one) for draw_one in torch.rand(24, generator=draw)]
    ids = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def collate(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(item["input_ids"]) for item in items)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([item[name] + [value] * (longest - len(item[name])) for item in items])

    mask = torch.tensor([[1] * len(item["labels"]) + [0] * (longest - len(item["labels"])) for item in items])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def small_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )


def trainer_of(kind: type[Trainer], output: str) -> Trainer:
    return kind(
        model=small_model(),
        args=TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=4,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=rows(),
        data_collator=collate,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", action="store_true", help="write the prepared data set, and train nothing")
    parser.add_argument("--output", default="out")
    options = parser.parse_args()
    trainer = trainer_of(Trainer, options.output)
    if options.prepare:
        prepared: Any = trainer.train_dataset
        prepared.save_to_disk("prepared")
        return
    trainer.train()


if __name__ == "__main__":
    main()
