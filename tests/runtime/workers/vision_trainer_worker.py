"""The cases of `trainer_worker` for vision-language models; started in the same way.

A script's data set holds what a processor would give for each row, and its collator pads and joins rows.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.runtime.vision_families import FAMILIES, Family
from tests.runtime.vision_trainer_plans import NUM_ROWS
from tests.runtime.workers.trainer_worker import Cases, common_arguments, main, outcome

PADDING = 0


class Rows(Dataset[Any]):
    def __init__(self, family: Family) -> None:
        self._family = family

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        return FAMILIES[self._family].inputs_of(row)


def collate(items: list[Any], *, family: Family) -> dict[str, torch.Tensor]:
    """Pad tokens and join pictures, as the processors of the families do for a batch."""
    longest = max(len(item.input_ids) for item in items)

    def padded(values: Any, value: int) -> torch.Tensor:
        return torch.tensor([[*of_row, *[value] * (longest - len(of_row))] for of_row in values])

    ids = padded([item.input_ids for item in items], PADDING)
    mask = padded([[1] * len(item.input_ids) for item in items], 0)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": padded([item.labels for item in items], -100)}
    batch |= FAMILIES[family].token_types(ids)
    for name in items[0].pictures:
        values = [item.visual[name] for item in items if name in item.visual]
        if values:
            joined = torch.cat(values)
            batch[name] = joined.float() if name.startswith("pixel") else joined
    return batch


def model(family: Family, *, frozen: bool = False) -> Any:
    """In fp32; no weights zero or alike, as initialisation leaves some."""
    torch.manual_seed(0)
    made = FAMILIES[family].plain_model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if frozen:
        made.base_model.requires_grad_(False)
        made.base_model.language_model.requires_grad_(True)
    return made


def train(
    folder: Path, family: Family = "qwen3_vl", *, frozen: bool = False, collator: Any = collate, **changes: Any
) -> dict[str, Any]:
    own = model(family, frozen=frozen)
    tower = {name: value.clone() for name, value in own.state_dict().items() if "visual" in name or "vision" in name}
    trainer = Trainer(
        model=own,
        args=TrainingArguments(**common_arguments(folder, remove_unused_columns=False, **changes)),
        train_dataset=Rows(family),
        data_collator=partial(collator, family=family),
    )
    trainer.train()
    found = outcome(trainer)
    moved = any(not torch.equal(found["weights"][name], value) for name, value in tower.items())
    assert moved != frozen and tower
    return found


def cases(num_ranks: int) -> Cases:
    """Names, and which plan of `vision_trainer_plans` they follow."""

    def case(family: Family, **changes: Any) -> tuple[str, Any]:
        return f"{family}-{num_ranks}.parquet", partial(train, family=family, **changes)

    def unplanned(family: Family, *, frozen: bool = False) -> tuple[str, Any]:
        return f"unplanned-{family}{'-frozen' * frozen}.parquet", partial(train, family=family, frozen=frozen)

    made: Cases = {
        f"unplanned {family}{' frozen' * frozen}": unplanned(family, frozen=frozen)
        for family in FAMILIES
        for frozen in (False, True)
    }
    if num_ranks == 4:
        return {"qwen3_vl": case("qwen3_vl"), "internvl frozen": case("internvl", frozen=True), **made}
    return {
        **made,
        "repeated qwen3_vl": unplanned("qwen3_vl"),
        "qwen3_vl": case("qwen3_vl"),
        "gemma3": case("gemma3"),
        "qwen3_vl frozen": case("qwen3_vl", frozen=True, per_device_train_batch_size=1, gradient_accumulation_steps=4),
        "qwen2_5_vl": case("qwen2_5_vl", per_device_train_batch_size=2, gradient_accumulation_steps=2),
        "internvl": case("internvl", gradient_checkpointing=True),
        "gemma3 frozen": case("gemma3", frozen=True),
        "gemma4": case("gemma4"),
    }


if __name__ == "__main__":
    own_folder, ranks, *wanted = sys.argv[1:]
    main(Path(own_folder), wanted, cases(int(ranks)), {})
