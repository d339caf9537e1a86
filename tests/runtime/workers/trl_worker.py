"""The cases of `trainer_worker` for TRL's trainers; started in the same way."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.runtime.models import VOCAB_SIZE, hugging_face
from tests.runtime.trainer_plans import GLOBAL_BATCH, PAIRED
from tests.runtime.workers.trainer_worker import (
    ITERATION,
    UNPLANNED,
    WAVES,
    Cases,
    common_arguments,
    main,
    outcome,
    rows,
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    known = {"?": 0, ".": 1, **{f"w{number}": number for number in range(2, VOCAB_SIZE)}}
    words = Tokenizer(WordLevel(known, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    kind: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = kind(tokenizer_object=words, pad_token="?", eos_token=".", unk_token="?")
    return found


def sft(folder: Path, *, averages_batches: bool = False, **changes: Any) -> dict[str, Any]:
    model: Any = hugging_face("qwen3", torch.float32)
    if averages_batches:  # as models of pictures say
        model.accepts_loss_kwargs = False
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**common_arguments(folder, **{"max_length": None, "bf16": False, **changes})),
        train_dataset=rows(),
        processing_class=tokenizer(),
    )
    trainer.train()
    return outcome(trainer)


def pairs() -> Dataset:
    """Pairs whose tokens, with a prompt of one token and the mark of the end, are as many as the plan says."""
    draw = torch.Generator().manual_seed(3)

    def words(count: int) -> str:
        return "".join(f" w{word}" for word in torch.randint(2, VOCAB_SIZE, (count,), generator=draw).tolist())

    return Dataset.from_dict(
        {
            "prompt": [words(1) for _ in PAIRED],
            "chosen": [words(chosen - 2) for chosen, _ in PAIRED],
            "rejected": [words(rejected - 2) for _, rejected in PAIRED],
        }
    )


def dpo(folder: Path, *, reference: bool = True, **changes: Any) -> dict[str, Any]:
    model = hugging_face("qwen3", torch.float32)
    with torch.no_grad():  # away from the reference, where every ratio would be 1
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    trainer = DPOTrainer(
        model=model,
        ref_model=hugging_face("qwen3", torch.float32) if reference else None,
        args=DPOConfig(**common_arguments(folder, max_length=None, bf16=False, **changes)),
        train_dataset=pairs(),
        processing_class=tokenizer(),
    )
    trainer.train()
    return outcome(trainer)


def accumulated_dpo(folder: Path) -> dict[str, Any]:
    """DPO over two batches a step, with what it wrote to stderr."""
    with redirect_stderr(io.StringIO()) as said:
        return {**dpo(folder, **ACCUMULATED), "said": said.getvalue()}


ACCUMULATED: dict[str, Any] = {"per_device_train_batch_size": GLOBAL_BATCH // 4, "gradient_accumulation_steps": 2}
PAIRS, PAIR_WAVES = "pairs-iteration.parquet", "pairs-waves.parquet"
CASES: Cases = {
    "sft": (ITERATION, sft),
    "sft, accumulated": (ITERATION, lambda folder: sft(folder, **ACCUMULATED)),
    "sft dft waves": (WAVES, lambda folder: sft(folder, loss_type="dft")),
    "sft, mean of batches": (ITERATION, lambda folder: sft(folder, averages_batches=True)),
    "dpo": (PAIRS, dpo),
    "dpo, accumulated": (PAIRS, accumulated_dpo),
    "unplanned sft": (UNPLANNED[0], sft),
    "unplanned dpo": (UNPLANNED[1], dpo),
    "dpo waves ipo": (PAIR_WAVES, lambda folder: dpo(folder, loss_type=["ipo", "sigmoid"], loss_weights=[1.0, 0.5])),
}
REFUSALS: Cases = {
    "sft packed": (ITERATION, lambda folder: sft(folder, packing=True, max_length=64)),
    "dpo that compares pairs": (PAIRS, lambda folder: dpo(folder, loss_type="aot")),
}


if __name__ == "__main__":
    os.environ.update(CI="1", HF_HUB_OFFLINE="1", FCP_TESTS_FORKS="")  # their server of forks imported without them
    main(Path(sys.argv[1]), sys.argv[2:], CASES, REFUSALS)
