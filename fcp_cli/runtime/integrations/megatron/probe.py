"""Before the first step: one tiny step on the plan's groups against the same sequences run alone, by Megatron itself.

A hook that a model class evades, a kernel that is wrong on this device, a group that mixes ranks up: most of these
change the loss by less than anybody would see in a curve. So gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.integrations.megatron.micro_batch import PlannedMicroBatch, current_micro_batch
from fcp_cli.runtime.integrations.megatron.model import forget_expert_counts, unwrapped
from fcp_cli.runtime.integrations.megatron.samples import TOKENS, LocalShard, Samples

# Relative L2 difference of a gradient that is still rounding.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_LABELS, _POSITIONS = "labels", "position_ids"


def probe(
    chunk: Any,
    rows: Iterable[MicroBatch],
    enter: Callable[[LocalShard], PlannedMicroBatch],
    *,
    load: Callable[[MicroBatch, Samples], LocalShard],
    rank: int,
    multiple: int,
    group: dist.ProcessGroup,
) -> float:
    """Run tiny sequences on the groups of these rows, and alone, and compare. All processes call it.

    Args:
        chunk: the model in its wrapping; its gradient buffers are zeroed.
        rows: of this rank, in the plan's order.
        enter: gives a shard its ring.
        load: makes a shard of a row.
        rank: of the plan.
        multiple: what tokens of a shard must be a multiple of.
        group: the processes that hold the same part of the model, one per rank.

    Returns:
        Relative L2 difference of the gradient of the first layer's query, key and value weights.

    Raises:
        RunError: it is more than rounding.
    """
    tiny = [_tiny(row, multiple) for row in rows]
    samples = Samples(dataset=_Numbers(_vocabulary(chunk), _axes(chunk)), collate=_collate, consumed=0)
    weight = unwrapped(chunk).decoder.layers[0].self_attention.linear_qkv.weight
    with chunk.no_sync():
        for row in tiny:
            _backward(chunk, enter(load(row, samples)))
    grouped = _take_gradient(chunk, weight, group)
    with chunk.no_sync():  # once more: zeroing the buffers ends it
        for row in tiny:
            for at, length in zip(row.sequences, row.lengths, strict=True):
                if rank == row.ranks[0]:
                    alone = replace(row, ranks=(rank,), sequences=(at,), lengths=(length,))
                    _backward_alone(chunk, load(alone, samples), weight.device)
    expected = _take_gradient(chunk, weight, group)
    forget_expert_counts(chunk)
    difference = _worst(float((grouped - expected).norm() / expected.norm().clamp_min(1e-30)), weight.device)
    tolerance = _TOLERANCES.get(weight.dtype, 5e-2)
    if not difference <= tolerance:  # nan too
        raise RunError(
            f"the probe before the first step failed: on the plan's groups a gradient differs by {difference:.1e} "
            f"(relative) from Megatron's own, and rounding explains {tolerance:.0e}; report it with "
            "the model and the output of fcp env"
        )
    return difference


class _Numbers:
    """Made-up sequences of any length; cut to what the plan says."""

    def __init__(self, vocabulary: int, axes: int) -> None:
        self._vocabulary = vocabulary
        self._axes = axes

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        numbers = (torch.arange(1 << 16) * (7919 + at) + at) % self._vocabulary
        positions = torch.arange(1 << 16)
        if self._axes > 1:
            positions = positions.expand(self._axes, -1)
        return {TOKENS: numbers, _LABELS: numbers.roll(-1), _POSITIONS: positions}


def _tiny(row: MicroBatch, multiple: int) -> MicroBatch:
    """Two short sequences that the degree does not divide, on the row's ranks; an idle row stays one."""
    if row.is_idle:
        return row
    lengths = (multiple * (2 * row.degree + 3), multiple * (row.degree + 1))
    return replace(row, sequences=(2 * row.order, 2 * row.order + 1), lengths=lengths)


def _vocabulary(chunk: Any) -> int:
    return int(min(unwrapped(chunk).vocab_size, 1 << 12))


def _axes(chunk: Any) -> int:
    return 3 if unwrapped(chunk).position_embedding_type == "mrope" else 1


def _collate(items: Any) -> dict[str, Tensor]:
    (item,) = items
    batch = {name: tensor.unsqueeze(0) for name, tensor in item.items()}
    if batch[_POSITIONS].dim() == 3:
        batch[_POSITIONS] = batch[_POSITIONS].transpose(0, 1)
    return batch


def _backward(chunk: Any, micro_batch: PlannedMicroBatch) -> None:
    token = current_micro_batch.set(micro_batch)
    try:
        losses = _losses(chunk, micro_batch.batch, micro_batch.positions.device)
    finally:
        current_micro_batch.reset(token)
    torch.autograd.backward((losses.flatten() * micro_batch.is_planned).sum())


def _backward_alone(chunk: Any, shard: LocalShard, device: torch.device) -> None:
    """By Megatron's own attention and rotary embedding, since no micro-batch is current."""
    losses = _losses(chunk, shard.batch, device)
    torch.autograd.backward((losses.flatten() * shard.is_planned.to(device)).sum())


def _losses(chunk: Any, batch: Any, device: torch.device) -> Tensor:
    tokens, labels, positions = (batch[name].to(device) for name in (TOKENS, _LABELS, _POSITIONS))
    losses: Tensor = chunk(tokens, positions, None, labels=labels)
    return losses


def _take_gradient(chunk: Any, weight: Any, group: dist.ProcessGroup) -> Tensor:
    """Summed over ranks, in fp32 or more; the model has none afterwards."""
    gradient: Tensor = weight.main_grad.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    chunk.zero_grad_buffer()
    dist.all_reduce(gradient, group=group)
    return gradient


def _worst(difference: float, device: torch.device) -> float:
    """Over all processes, so that all stop or none."""
    found = torch.tensor(difference, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
