"""Exchange between the ranks, at the end of a step, their timings and whether one was asked to stop, or still saves.

One all-gather of a small float64 vector per step, on the CPU, so that no accelerator waits for it.
The vector's size follows from the plan; a float64 holds an order number exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics import MicroBatchTiming

# order, start seconds and seconds of one micro-batch
_FIELDS = 3
_HEADER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """What all ranks know at the end of a step, the same on each.

    Attributes:
        stop: one was asked to stop.
        writing: one has files of a checkpoint that are not on disk yet.
        peak_bytes: the most memory that one has had.
        ranks: the timings of every rank.
    """

    stop: bool
    writing: bool
    peak_bytes: int
    ranks: list[list[MicroBatchTiming]]


def encode(
    timings: Sequence[tuple[int, float, float]],
    *,
    most: int,
    stop: bool = False,
    writing: bool = False,
    peak_bytes: int = 0,
) -> torch.Tensor:
    """Encode as [4 + 3 * most] float64: two flags, bytes, number of timings, then (order, start, seconds) each."""
    vector = torch.zeros(_HEADER + 1 + _FIELDS * most, dtype=torch.float64)
    vector[: _HEADER + 1] = torch.tensor([stop, writing, peak_bytes, len(timings)], dtype=torch.float64)
    if timings:
        first = _HEADER + 1
        vector[first : first + _FIELDS * len(timings)] = torch.tensor(timings, dtype=torch.float64).flatten()
    return vector


def decode(vectors: Sequence[torch.Tensor], plan: StepPlan) -> Exchanged:
    return Exchanged(
        stop=any(bool(vector[0]) for vector in vectors),
        writing=any(bool(vector[1]) for vector in vectors),
        peak_bytes=max(int(vector[2]) for vector in vectors),
        ranks=[_timings_of(vector, plan) for vector in vectors],
    )


def _timings_of(vector: torch.Tensor, plan: StepPlan) -> list[MicroBatchTiming]:
    count = int(vector[_HEADER])
    rows = vector[_HEADER + 1 : _HEADER + 1 + _FIELDS * count].view(count, _FIELDS).tolist()
    return [
        MicroBatchTiming(
            order=int(order),
            degree=int(plan.degrees[int(order)]),
            tokens=int(plan.tokens[int(order)]),
            predicted_seconds=float(plan.seconds[int(order)]),
            start_seconds=start,
            seconds=seconds,
        )
        for order, start, seconds in rows
    ]


def most_microbatches(plan: StepPlan) -> int:
    """Return the number of micro-batches of the rank that has most in this step."""
    return int(torch.bincount(torch.from_numpy(plan.ranks.astype("int64"))).max())


def gather_timings(
    plan: StepPlan, timings: Sequence[tuple[int, float, float]], *, stop: bool, writing: bool, peak_bytes: int
) -> Exchanged:
    """Send this rank's timings, flags and peak of memory to all; return those of all ranks."""
    mine = encode(timings, stop=stop, writing=writing, peak_bytes=peak_bytes, most=most_microbatches(plan))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return decode(gathered, plan)
