"""One rank of a job that trains by `transformers.Trainer` in many ways; each leaves `CASE-RANK.pickle` in a folder.

Run by torchrun as `-m tests.runtime.workers.trainer_worker FOLDER CASE...`. First all cases run as the unmodified
scripts that they are, then once more with fcp's hooks, under the folder's plans.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from fcp_cli.errors import FcpError
from fcp_cli.runtime.integrations.trainer_hooks import hook_trainer
from tests.patience import PATIENCE_SECONDS
from tests.runtime.models import VOCAB_SIZE, hugging_face
from tests.runtime.trainer_plans import GLOBAL_BATCH, LENGTHS
from tests.runtime.workers.leave import leave_job

ITERATION, WAVES = "iteration.parquet", "waves.parquet"


def rows(lengths: tuple[int, ...] = LENGTHS) -> Dataset:
    """A prompt that is not learned, and an answer that is."""
    draw = torch.Generator().manual_seed(7)
    ids = [torch.randint(1, VOCAB_SIZE, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_dict(
        {"input_ids": ids, "labels": [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in ids]}
    )


def collate(items: list[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad as any script does."""
    longest = max(len(item["input_ids"]) for item in items)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([[*item[name], *[value] * (longest - len(item[name]))] for item in items])

    mask = torch.tensor([[1] * len(item["input_ids"]) + [0] * (longest - len(item["input_ids"])) for item in items])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "optim": "sgd",
        "learning_rate": 0.1,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        "train_sampling_strategy": "sequential",
        "num_train_epochs": 1,
    }
    return TrainingArguments(**{**given, **changes})


def outcome(trainer: Any, model: Any = None) -> dict[str, Any]:
    state = (model or trainer.accelerator.unwrap_model(trainer.model)).state_dict()
    return {
        "log": trainer.state.log_history,
        "weights": {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()
        },
    }


def train(folder: Path, *, model: Any = None, resume: bool | str | None = None, **changes: Any) -> dict[str, Any]:
    trainer = Trainer(
        model=model or hugging_face("qwen3", torch.float32),
        args=arguments(folder, **changes),
        train_dataset=rows(),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


CASES: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "ddp": (ITERATION, train),
    "ddp waves": (WAVES, train),
    "accumulation": (
        ITERATION,
        lambda folder: train(folder, gradient_accumulation_steps=2, per_device_train_batch_size=GLOBAL_BATCH // 4),
    ),
}


def main(folder: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for phase in ("plain", "planned"):
        if phase == "planned":
            hook_trainer(transformers.trainer)
        for name in names:
            plan, run = CASES[name]
            os.environ["FCP_PLAN"] = str(folder / plan)
            own = folder / phase / name
            own.mkdir(parents=True, exist_ok=True)
            try:
                result = run(own)
            except FcpError as error:
                result = str(error)
            (own / f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps(result))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
