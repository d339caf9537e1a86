"""Train a small Qwen3 on Python's own sources with transformers' Trainer. Nothing in this script knows of plans.

    torchrun --nproc-per-node 2 train.py alone.json
    fcp launch --ranks 2 -- train.py planned.json

A second word says how batches are made: `padded` (as if left out), `group_by_length` or `padding_free`. A row is a
function or a class, one token per byte. The JSON file gets seconds of training, losses and the loss of evaluation.
"""

import json
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

ROWS, EVALUATED_ROWS, LONGEST = 128, 16, 1024


def draw_rows() -> Dataset:
    """Draw functions and classes of the standard library, always the same."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    pieces = re.split(r"\n(?= *(?:def|class) )", text)[1:]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    ids = [list(pieces[at].encode()[:LONGEST]) for at in order[: ROWS + EVALUATED_ROWS]]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Make a batch as long as its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(row["labels"]) + [0] * (longest - len(row["labels"])) for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def main(output: str, batches: str = "padded") -> None:
    """Train, evaluate, and write what came of it."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes))
    data = draw_rows()
    flattening: Any = DataCollatorWithFlattening
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="trainer",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            num_train_epochs=1,
            train_sampling_strategy="group_by_length" if batches == "group_by_length" else "sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data.select(range(ROWS)),
        eval_dataset=data.select(range(ROWS, ROWS + EVALUATED_ROWS)),
        data_collator=flattening() if batches == "padding_free" else pad,
    )
    seconds = trainer.train().metrics["train_runtime"]
    evaluated = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        Path(output).write_text(json.dumps({"seconds": seconds, "losses": losses, "eval_loss": evaluated}))
    trainer.accelerator.wait_for_everyone()  # gloo may abort a process that leaves in the midst of its last exchange


if __name__ == "__main__":
    main(*sys.argv[1:])
