"""Loads exactly the tokens that one rank holds of its micro-batches, ahead of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.plan.reader import PlanReader
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.cursor import RankStep
from fcp_cli.runtime.layout import ShardLayout, shard_layout
from fcp_cli.runtime.loss import IGNORED, next_token_labels

Fetch: TypeAlias = Callable[[int], Any]
"""From a manifest row to the sequence's tokens, or to (tokens, labels); arrays, tensors or lists of integers.

Labels are as long as the tokens and belong to them one by one, as Hugging Face data sets have them (-100 where the
token is not to be learned, a prompt for example); shifting them to the next token is done here.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank holds of one micro-batch; all tensors [1, tokens] int64.

    A rank that holds no token (an idle row, or a pack with fewer tokens than ranks) gets one pad token outside every
    sequence, with an ignored label, so that it takes part in every forward and backward with weight zero.

    Attributes:
        row: the micro-batch in the plan.
        member: this rank's place in the ring.
        layout: who holds which tokens.
        input_ids, position_ids: tokens, and their positions within their own sequences.
        labels: the token after each, -100 at the end of a sequence.
    """

    row: MicroBatch
    member: int
    layout: ShardLayout
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedStep:
    """One step's shards of one rank; `labelled_tokens` counts the labels among them that are not ignored."""

    plan: RankStep
    shards: tuple[Shard, ...]
    labelled_tokens: int


def load_steps(
    steps: Iterable[RankStep], fetch: Fetch, *, rank: int, labelled: bool, device: torch.device
) -> Iterator[LoadedStep]:
    """Load this rank's shards step by step.

    Args:
        steps: what to load.
        fetch: where from.
        rank: global rank.
        labelled: whether `fetch` returns labels, of which the ranks must have the same opinion.
        device: where the shards will go: for CUDA they are put in page-locked memory.

    Raises:
        RunError: a sequence is shorter than the plan says; its labels are not as long as its tokens, or come against
            `labelled`.
    """
    for step in steps:
        shards = tuple(load_shard(row, fetch, rank=rank, labelled=labelled) for row in step.rows)
        count = sum(int((shard.labels != IGNORED).sum()) for shard in shards)
        for shard in shards:
            _prepare_hops(shard, packed=device.type != "cpu")
        if device.type == "cuda":
            shards = tuple(map(_pinned, shards))
        yield LoadedStep(plan=step, shards=shards, labelled_tokens=count)


def fetches_labels(path: Path, first_step: int, fetch: Fetch) -> bool:
    """Whether `fetch` returns (tokens, labels), from the first sequence to be trained; the same on every rank."""
    for step in PlanReader(path).steps(first_step):
        return isinstance(fetch(int(step.sequences[0])), tuple)
    return False


def load_shard(row: MicroBatch, fetch: Fetch, *, rank: int, labelled: bool = False) -> Shard:
    """This rank's part of one micro-batch."""
    member = row.ranks.index(rank)
    layout = shard_layout(row.lengths, row.degree)
    place = partial(Shard, row=row, member=member, layout=layout)
    if not layout.tokens(member):
        pad = torch.zeros((1, 1), dtype=torch.int64)
        return place(input_ids=pad, position_ids=pad.clone(), labels=torch.full_like(pad, IGNORED))
    sequences = [_sequence(fetch, at, length, labelled) for at, length in zip(row.sequences, row.lengths, strict=True)]
    index = torch.from_numpy(layout.index(member))
    return place(
        input_ids=torch.cat([tokens for tokens, _ in sequences])[index].unsqueeze(0),
        position_ids=torch.from_numpy(layout.position_ids(member)).unsqueeze(0),
        labels=torch.cat([labels for _, labels in sequences])[index].unsqueeze(0),
    )


def _sequence(fetch: Fetch, at: int, length: int, labelled: bool) -> tuple[Tensor, Tensor]:
    """Tokens and next-token labels of one sequence, cut to the plan's length."""
    found = fetch(at)
    if isinstance(found, tuple) != labelled:
        raise RunError(
            f"fetch returned {'no ' if labelled else ''}labels for row {at} of the data, unlike for the first"
        )
    tokens = _tokens(found[0] if labelled else found)
    if len(tokens) < length:
        raise RunError(
            f"row {at} of the data has {len(tokens)} tokens but {length} in the plan: the plan was made from another "
            "manifest; build it again with 'fcp manifest build' and 'fcp plan'"
        )
    if not labelled:
        return tokens[:length], next_token_labels(tokens[:length])
    labels = _tokens(found[1])
    if len(labels) != len(tokens):
        raise RunError(
            f"row {at} of the data has {len(tokens)} tokens but {len(labels)} labels; fetch must return as many"
        )
    return tokens[:length], next_token_labels(labels[:length])


def _tokens(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)


def _prepare_hops(shard: Shard, *, packed: bool) -> None:
    """Work out here what the first layer's attention would otherwise hold the training loop up with."""
    for source in range(shard.layout.degree):
        shard.layout.hops(shard.member, source, packed=packed)


def _pinned(shard: Shard) -> Shard:
    return Shard(
        row=shard.row,
        member=shard.member,
        layout=shard.layout,
        input_ids=shard.input_ids.pin_memory(),
        position_ids=shard.position_ids.pin_memory(),
        labels=shard.labels.pin_memory(),
    )
