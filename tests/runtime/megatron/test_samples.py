"""What a data set's items must be before a plan can cut and pack them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.cursor import RankStep
from fcp_cli.runtime.integrations.megatron.samples import LoadedStep, Samples, load_shard, pinned

pytestmark = pytest.mark.torch

LENGTH = 8
PLANNED = 6
ROW = MicroBatch(
    step=0, wave=-1, order=0, ranks=(0,), sequences=(0,), lengths=(PLANNED,), start_seconds=0.0, seconds=0.0
)


def load(**item: Any) -> dict[str, Tensor]:
    """The batch of an item of 8 tokens, of which 6 are planned."""
    samples = Samples(dataset=[{"tokens": torch.arange(LENGTH), **item}], collate=lambda items: items[0], consumed=0)
    return dict(load_shard(ROW, samples, rank=0).batch)


def documents(*lengths: int) -> Tensor:
    """Which tokens Megatron hides from which where documents do not see each other."""
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return (later | (number[:, None] != number)).unsqueeze(0)


@pytest.mark.parametrize(
    "item",
    [
        {},
        {"attention_mask": documents(LENGTH)},
        {"attention_mask": documents(PLANNED, LENGTH - PLANNED)},  # what follows is not planned
        {"position_ids": torch.arange(LENGTH)},
        {"position_ids": torch.arange(LENGTH).expand(3, -1)},
        {"cu_seqlens": torch.tensor([0, LENGTH], dtype=torch.int32)},
    ],
)
def test_an_item_that_is_one_sequence_is_cut_to_its_planned_length(item: dict[str, Tensor]) -> None:
    assert load(**item)["tokens"].tolist() == list(range(PLANNED))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"attention_mask": documents(3, 5)}, "row 0 of the data set is cut into documents"),
        ({"position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])}, "leave --reset-attention-mask and --reset-pos"),
        ({"cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32)}, "row 0 of the data set is a pack of 2 sequences"),
    ],
)
def test_an_item_of_several_documents_is_refused(item: dict[str, Tensor], message: str) -> None:
    """Its tokens would see those of other documents, which changes the loss a little and stops nothing."""
    with pytest.raises(RunError) as error:
        load(**item)
    assert message in str(error.value)


def test_a_step_for_a_gpu_lies_in_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        locked.append(tensor.clone())
        return locked[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    samples = Samples(
        dataset=[{"tokens": torch.arange(LENGTH)}], collate=lambda items: {**items[0], "n": 1}, consumed=0
    )
    shard = load_shard(ROW, samples, rank=0)
    plan = RankStep(
        step=0, rows=(ROW,), makespan_seconds=0.0, bound_seconds=0.0, tokens=PLANNED, loss_tokens=5, sequences=1
    )
    step = LoadedStep(plan=plan, shards=(shard,))
    (moved,) = pinned(step).shards
    tensors = [
        value for value in (*moved.batch.values(), moved.positions, moved.is_planned) if isinstance(value, Tensor)
    ]
    assert all(any(tensor is found for found in locked) for tensor in tensors)
    assert moved.batch["n"] == 1
    assert moved.batch["tokens"].tolist() == list(range(PLANNED))
