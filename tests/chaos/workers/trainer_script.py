"""Fine-tunes a small decoder with Trainer, from its newest whole checkpoint. Nothing in it knows of plans."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from train import collate, rows, small_model  # examples/hugging_face/train.py, copied beside it
from transformers import Trainer, TrainerCallback, TrainingArguments

EVERY = 3
# Longer than its arithmetic takes, so that a fault strikes within a step.
STEP_SECONDS = 0.3


class Slowly(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        time.sleep(STEP_SECONDS)


def newest(folder: Path) -> str | None:
    """Return the newest checkpoint that has every rank's part: Trainer writes into the folder that it will be."""
    ranks = range(int(os.environ["WORLD_SIZE"]))
    parts = ("trainer_state.json", *(f"rng_state_{rank}.pth" for rank in ranks))
    whole = [path for path in folder.glob("checkpoint-*") if all((path / part).is_file() for part in parts)]
    return str(max(whole, key=lambda path: int(path.name.rpartition("-")[2]))) if whole else None


def main(output: Path) -> None:
    trainer = Trainer(
        model=small_model(),
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=2,
            num_train_epochs=2,
            logging_steps=1,
            save_steps=EVERY,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows(),
        data_collator=collate,
        callbacks=[Slowly()],
    )
    trainer.train(resume_from_checkpoint=newest(output))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
