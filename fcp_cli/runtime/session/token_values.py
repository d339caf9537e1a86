"""Per-token values, gathered from ranks to whole sequences and scattered back, e.g. log-probabilities.

Passes over one rollout have separate plans, so a rank rarely holds the same tokens twice. `collect` gathers the values
of a pass as one tensor per manifest row, and the next pass takes its shards with `part_of`. A value has the index of
the predicting token, like its label, so the last value of each sequence is meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.communication.world import World, gather_rows, gather_words
from fcp_cli.runtime.layouts.layout import ShardLayout
from fcp_cli.runtime.loss.labels import IGNORED

_BLOCK_TOKENS = 1024  # tokens whose logits are held in fp32 at a time


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, in at least fp32; 0 for tokens without a label.

    Args:
        logits: [1, tokens, vocabulary].
        labels: [1, tokens] int64, `IGNORED` if there is nothing to predict.
    """
    kind = torch.promote_types(logits.dtype, torch.float32)
    parts = [
        -functional.cross_entropy(some.to(kind), of, ignore_index=IGNORED, reduction="none")
        for some, of in zip(torch.split(logits[0], _BLOCK_TOKENS), torch.split(labels[0], _BLOCK_TOKENS), strict=True)
    ]
    return torch.cat(parts).unsqueeze(0)


def part_of(values: Mapping[int, Tensor], row: MicroBatch, layout: ShardLayout, member: int) -> Tensor:
    """Return the values [1, tokens, ...] of a rank's tokens of a micro-batch; one 0 for a rank without tokens.

    Args:
        values: manifest row -> [length, ...].
        row, layout, member: the micro-batch, its layout, and the rank's index in it.
    """
    for sequence, length in zip(row.sequences, row.lengths, strict=True):
        found = values.get(sequence)
        if found is None or found.shape[:1] != (length,):
            has = "no values" if found is None else f"values of the shape {tuple(found.shape)}"
            raise RunError(f"row {sequence} has {has}; the micro-batch needs one for each of its {length} tokens")
    if not layout.tokens(member):
        any_values = next(iter(values.values()), torch.zeros(0))
        return any_values.new_zeros((1, 1, *any_values.shape[1:]))
    pack = torch.cat([values[sequence] for sequence in row.sequences])
    return pack[torch.from_numpy(layout.index(member)).to(pack.device)].unsqueeze(0)


def collect(
    world: World,
    parts: Sequence[tuple[MicroBatch, ShardLayout, int, Tensor]],
    device: torch.device,
    *,
    fault: str = "",
) -> dict[int, Tensor]:
    """Gather per-token values on every rank: manifest row -> [length]. Every rank calls it.

    Args:
        world: all ranks.
        parts: per micro-batch of this rank: its row, its layout, the rank's index in it, and [1, tokens] values.
        device: device of the exchange and of the result.
        fault: error on this rank, if it has no parts because of one.
    """
    fault = fault or _fault(parts)
    # Member 0 of each ring announces its sequences. Then every rank fills in its tokens of a zero tensor, and a sum
    # joins them.
    told = [
        (sequence, length)
        for row, _, member, _ in parts
        if member == 0
        for sequence, length in zip(row.sequences, row.lengths, strict=True)
    ]
    is_double = any(values.dtype == torch.float64 for *_, values in parts)
    facts = gather_words(world, (int(is_double), int(bool(fault))), device)
    if faulty := [rank for rank, (_, is_faulty) in enumerate(facts) if is_faulty]:
        raise RunError(fault or f"values of rank {faulty[0]} are not one per token; its own message says which")
    table = torch.cat(gather_rows(world, torch.tensor(told, dtype=torch.int64, device=device).reshape(-1, 2), device))
    offsets, total = {}, 0
    for sequence, length in table.tolist():
        offsets[sequence] = (total, total + length)
        total += length
    # Agree over all ranks, since the values of an idle rank may have another data type.
    flat = torch.zeros(
        total, dtype=torch.float64 if any(double for double, _ in facts) else torch.float32, device=device
    )
    for row, layout, member, values in parts:
        if layout.tokens(member):
            starts = torch.cat([torch.arange(*offsets[sequence]) for sequence in row.sequences])
            places = starts[torch.from_numpy(layout.index(member))].to(device)
            flat[places] = values.detach().flatten().to(device=device, dtype=flat.dtype)
    world.all_reduce_sum(flat)
    return {sequence: flat[start:end] for sequence, (start, end) in offsets.items()}


def _fault(parts: Sequence[tuple[MicroBatch, ShardLayout, int, Tensor]]) -> str:
    """Return a description of the first micro-batch whose values do not match this rank's tokens, or ""."""
    for row, layout, member, values in parts:
        if values.numel() != max(layout.tokens(member), 1):
            return (
                f"micro-batch {row.order} has values of the shape {tuple(values.shape)}, but this rank holds "
                f"{layout.tokens(member)} of its tokens; give one value for each"
            )
    return ""
