"""What a data set's items must be before a plan can cut and pack them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron.data import (
    LocalShard,
    Samples,
    find_samples,
    hook_cycling,
    hook_splitting,
    load_shard,
    mask_of,
)
from fcp_cli.runtime.cursor import RankMicroBatches
from fcp_cli.runtime.loader import pinned
from fcp_cli.util.masks import CAUSAL, Mask, MaskRows, chunk_pairs, full, prefix, segments
from tests.masks import Masked, seen
from tests.runtime.plans import microbatch

pytestmark = pytest.mark.torch

LENGTH = 8
PLANNED = 6
ROW = microbatch((PLANNED,))


def load(**item: Any) -> dict[str, Tensor]:
    """The batch of an item of 8 tokens, of which 6 are planned."""
    return dict(shard_of(item).batch)


def samples_of(item: dict[str, Any], **settings: Any) -> Samples:
    """A data set of one item of 8 tokens."""
    dataset = [{"tokens": torch.arange(LENGTH), **item}]
    return Samples(dataset=dataset, **{"collate": lambda items: items[0], "consumed": 0, **settings})


def shard_of(item: dict[str, Any], *, degree: int = 1, member: int = 0) -> LocalShard:
    """The part of one rank of several of the first 6 tokens of an item of 8."""
    return load_shard(replace(ROW, ranks=tuple(range(degree))), samples_of(item), rank=member)


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


@pytest.mark.parametrize("sees", [torch.logical_not, torch.clone])  # in some masks true is what is seen
@pytest.mark.parametrize("mask", [CAUSAL, full(), prefix(4), segments([(0, 2), (2, 5), (6, 8)])])
def test_an_attention_mask_by_which_tokens_see_later_ones_is_followed(
    mask: Mask, sees: Callable[[Tensor], Tensor]
) -> None:
    """A mask of documents hides; this one opens, and the last token of it sees all, as that of a causal one."""
    item = {"tokens": torch.arange(LENGTH), "attention_mask": sees(torch.from_numpy(seen(Masked(mask, LENGTH))))}
    found = mask_of(item, 0, LENGTH)
    assert seen(Masked(found, LENGTH)).tolist() == seen(Masked(mask, LENGTH)).tolist()
    assert shard_of(item, degree=2).layout.masks == (() if mask is CAUSAL else (found,))


def test_an_item_with_a_mask_of_its_own_has_the_positions_of_that() -> None:
    pairs = chunk_pairs([1, 2])
    shard = shard_of({"mask": pairs, "position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])})
    assert shard.layout.masks == (pairs,)
    assert shard.batch["position_ids"].tolist() == shard.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert "mask" not in shard.batch


PREFIXES = MaskRows("prefix", np.array([0, 1]), np.array([4]))


@pytest.mark.parametrize("item", [{}, {"mask": prefix(4)}])
def test_a_plan_that_keeps_masks_gives_them_to_items_that_say_nothing(item: dict[str, Any]) -> None:
    assert load_shard(ROW, samples_of(item, masks=PREFIXES), rank=0).layout.masks == (prefix(4),)


@pytest.mark.parametrize(
    ("mask", "settings", "even_chunks", "message"),
    [
        (
            prefix(3),
            {"masks": PREFIXES, "manifest": "lengths.parquet"},
            False,
            "row 0 of the data comes with another mask",
        ),
        (full(), {}, True, "row 0 of the data set has a mask, which rings of equal chunks do not follow; set"),
    ],
    ids=["other than planned", "in equal chunks"],
)
def test_a_mask_that_a_ring_cannot_follow_is_refused(
    mask: Mask, settings: dict[str, Any], even_chunks: bool, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        load_shard(ROW, samples_of({"mask": mask}, **settings), rank=0, even_chunks=even_chunks)


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
        (
            {"attention_mask": ~torch.from_numpy(seen(Masked(chunk_pairs([2, 2]), LENGTH)))},
            "row 0 of the data set has an attention_mask that is not causal, but for spans whose tokens see each other",
        ),
        (
            {"mask": segments([(4, 9)])},
            "row 0 of the data set has 8 tokens, 6 in the plan, but its mask has a span up to",
        ),
        (
            {"mask": chunk_pairs([2, 2])},
            "row 0 of the data set has 8 tokens, 6 in the plan, but its mask has chunk pairs",
        ),
        ({"position_ids": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])}, "position_ids that begin anew, but neither"),
        ({"cu_seqlens": torch.tensor([1, 8])}, "row 0 of the data set has cu_seqlens that do not ascend from 0; they"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, *[8] * 9])}, "from 0; they begin [0, 5, 3, 8, 8, 8, 8, 8]"),
    ],
)
def test_an_item_of_which_nobody_knows_what_sees_what_is_refused(item: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RunError) as error:
        load(**item)
    assert message in str(error.value)


@pytest.mark.parametrize("even_chunks", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_what_follows_a_token_is_what_follows_it_in_its_sequence_whoever_holds_that(
    degree: int, even_chunks: bool
) -> None:
    """A pack of sequences of 4 and 2 tokens; in the second, no token has a loss two places ahead."""
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])
    item = {"tokens": torch.arange(1, 9), "loss_mask": mask, "cu_seqlens": torch.tensor([0, 4, LENGTH])}
    samples = samples_of(item)
    found: dict[int, list[float]] = {}
    for member in range(degree):
        row = replace(ROW, ranks=tuple(range(degree)))
        shard = load_shard(row, samples, rank=member, even_chunks=even_chunks, places_ahead=2)
        ahead = shard.ahead
        assert ahead is not None
        assert ahead.counts == (2.5, 1.5, 0.5)  # in the mean of the two sequences
        values = torch.stack([*ahead.values["tokens"], *ahead.values["loss_mask"], *ahead.ratio], dim=-1)
        found.update(zip(shard.batch["tokens"].tolist(), values.tolist(), strict=True))
    found.pop(0, None)  # padding
    assert found == {
        1: [2, 3, 1, 0, 1.5, 3.0],
        2: [3, 4, 0, 1, 1.5, 3.0],
        3: [4, 0, 1, 0, 1.5, 3.0],
        4: [0, 0, 0, 0, 1.5, 3.0],
        5: [6, 0, 1, 0, 2.0, 2.0],
        6: [0, 0, 0, 0, 2.0, 2.0],
    }


class _Packs:
    """Packs as Megatron-Bridge keeps them: a token more of each sequence than it trains on, and where they begin."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": list(range(10 * at, 10 * at + LENGTH + 2)), "seq_boundaries": [0, 4, LENGTH + 2]}


def _collated(items: list[dict[str, Any]]) -> dict[str, Any]:
    (item,) = items
    first, second = item["input_ids"][:4], item["input_ids"][4:]
    return {
        "tokens": torch.tensor([[*first[:-1], *second[:-1], -7]]),  # padded at the end
        "labels": torch.tensor([[*first[1:], *second[1:], -7]]),
        "cu_seqlens_q": torch.tensor([[0, 3, LENGTH, LENGTH + 1]]),
        "attention_mask": None,
        "token_count": [LENGTH],
    }


@pytest.fixture
def bridge() -> ModuleType:
    """Return the functions of Megatron-Bridge through which a batch loader passes, hooked."""

    def cyclic_iter(iter: Any) -> Any:
        while True:
            yield from iter

    def prepare_finetuning_batch(data_iterator: Any, num_microbatches: int, default_seq_length: int) -> Any:
        return iter(next(data_iterator)), 77

    module = ModuleType("megatron.bridge.data")
    module.__dict__.update(cyclic_iter=cyclic_iter, prepare_finetuning_batch=prepare_finetuning_batch)
    hook_cycling(module)
    hook_splitting(module)
    return module


def test_the_packs_behind_a_loader_of_whole_batches_are_read_as_its_collation_makes_them(bridge: ModuleType) -> None:
    loader: Any = DataLoader(_Packs(), batch_sampler=_Counting([[0, 1], [2, 3]]), collate_fn=_collated)  # type: ignore[arg-type]
    samples = find_samples(bridge.cyclic_iter(loader))
    assert (len(samples.dataset), samples.consumed) == (4, 6)
    shards = [load_shard(replace(ROW, ranks=(0, 1), lengths=(LENGTH,)), samples, rank=rank) for rank in range(2)]
    assert all(shard.layout.lengths == (3, LENGTH - 3) for shard in shards)
    tokens = torch.cat([shard.batch["tokens"][0] for shard in shards])
    labels = torch.cat([shard.batch["labels"][0] for shard in shards])
    assert sorted(tokens.tolist()) == [0, 1, 2, *range(4, LENGTH + 1)]
    assert labels.tolist() == (tokens + 1).tolist()


def test_a_training_step_draws_no_batch_and_evaluation_does(bridge: ModuleType) -> None:
    batches = iter([["drawn"]])
    assert bridge.prepare_finetuning_batch(batches, 1, 16) == (batches, 16)
    with torch.no_grad():
        found, length = bridge.prepare_finetuning_batch(
            data_iterator=batches, num_microbatches=1, default_seq_length=16
        )
    assert (list(found), length) == (["drawn"], 77)


def test_a_loader_begins_again_where_it_ends(bridge: ModuleType) -> None:
    cycle = iter(bridge.cyclic_iter([1, 2]))
    assert [next(cycle) for _ in range(5)] == [1, 2, 1, 2, 1]


class _Counting(list[list[int]]):
    consumed_samples = 6


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
    shard = load_shard(ROW, samples_of({}, collate=lambda items: {**items[0], "n": 1}), rank=0)
    step = RankMicroBatches(
        step=0, rows=(ROW,), makespan_seconds=0.0, bound_seconds=0.0, loss_tokens=5, sequences=1, shards=(shard,)
    )
    (moved,) = pinned(step).shards
    tensors = [
        value for value in (*moved.batch.values(), moved.positions, moved.is_planned) if isinstance(value, Tensor)
    ]
    assert all(any(tensor is found for found in locked) for tensor in tensors)
    assert moved.batch["n"] == 1
    assert moved.batch["tokens"].tolist() == list(range(PLANNED))
