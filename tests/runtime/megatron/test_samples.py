"""What a data set's items must be before a plan can cut and pack them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.cursor import RankStep
from fcp_cli.runtime.integrations.megatron.samples import (
    LoadedStep,
    LocalShard,
    Samples,
    find_samples,
    load_shard,
    pinned,
)

pytestmark = pytest.mark.torch

LENGTH = 8
PLANNED = 6
ROW = MicroBatch(
    step=0, wave=-1, order=0, ranks=(0,), sequences=(0,), lengths=(PLANNED,), start_seconds=0.0, seconds=0.0
)


def load(**item: Any) -> dict[str, Tensor]:
    """The batch of an item of 8 tokens, of which 6 are planned."""
    return dict(shard_of(item).batch)


def shard_of(item: dict[str, Any], *, degree: int = 1, member: int = 0) -> LocalShard:
    """The part of one rank of several of the first 6 tokens of an item of 8."""
    samples = Samples(dataset=[{"tokens": torch.arange(LENGTH), **item}], collate=lambda items: items[0], consumed=0)
    return load_shard(replace(ROW, ranks=tuple(range(degree))), samples, rank=member)


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
    ("item", "lengths"),
    [
        ({"attention_mask": documents(3, 5)}, (3, 3)),
        ({"cu_seqlens": torch.tensor([0, 3, LENGTH], dtype=torch.int32)}, (3, 3)),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, (3, 2, 1)),  # what follows is padding, a sequence of its own
        ({"cu_seqlens": torch.tensor([0, 3, 5, *[LENGTH] * 6])}, (3, 2, 1)),  # as --sft has it since 0.19
        ({"cu_seqlens_q": torch.tensor([0, 3, LENGTH, -1, -1])}, (3, 3)),  # as Megatron-Bridge has it
        ({"cu_seqlens": torch.tensor([0, 2, 5]), "cu_seqlens_padded": torch.tensor([0, 3, LENGTH])}, (3, 3)),
    ],
)
def test_the_sequences_of_a_pack_are_cut_apart_and_shared_out_one_by_one(
    item: dict[str, Tensor], lengths: tuple[int, ...]
) -> None:
    """Else their tokens would see those of others, which changes the loss a little and stops nothing."""
    shards = [shard_of(item, degree=2, member=member) for member in range(2)]
    for member, shard in enumerate(shards):
        assert shard.layout.lengths == lengths
        assert shard.batch["tokens"].tolist() == shard.layout.index(member).tolist()
    assert sorted(int(token) for shard in shards for token in shard.batch["tokens"]) == list(range(PLANNED))


def test_a_pack_keeps_positions_that_run_on_and_its_rotary_ones_begin_anew() -> None:
    shard = shard_of({"cu_seqlens": torch.tensor([0, 4, LENGTH]), "position_ids": torch.arange(LENGTH)})
    assert shard.batch["position_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert shard.positions.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            {"attention_mask": documents(LENGTH) | (torch.arange(LENGTH) == 2)},
            "token 5 does not see all tokens of one document",
        ),
        ({"position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])}, "position_ids that begin anew, but neither"),
        ({"cu_seqlens": torch.tensor([1, 8])}, "row 0 of the data set has cu_seqlens that do not ascend from 0; they"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, *[8] * 9])}, "from 0; they are 0, 5, 3, 8, 8, 8, 8, 8, ..."),
    ],
)
def test_an_item_of_which_nobody_knows_what_sees_what_is_refused(item: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RunError) as error:
        load(**item)
    assert message in str(error.value)


def test_batches_that_were_drawn_before_the_schedule_was_asked_are_refused() -> None:
    """As by Megatron-Bridge for fine-tuning: the plan's rows cannot be read out of them."""
    with pytest.raises(RunError, match="the data iterator is a list_iterator, behind which no data set"):
        find_samples(iter([{"tokens": torch.arange(LENGTH)}]))


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
