"""Exchange between the ranks, at the end of a step, their timings and whether one was asked to stop.

One all-gather of a small float64 vector per step, on the CPU, so that no accelerator waits for it.
The vector's size follows from the plan; a float64 holds an order number exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics import MicroBatchTiming

# order, start seconds and seconds of one micro-batch
_FIELDS = 3


def encode(timings: Sequence[tuple[int, float, float]], *, stop: bool, most: int) -> torch.Tensor:
    """Encode as [2 + 3 * most] float64: stop flag, number of timings, then (order, start, seconds) each."""
    vector = torch.zeros(2 + _FIELDS * most, dtype=torch.float64)
    vector[0], vector[1] = float(stop), float(len(timings))
    if timings:
        vector[2 : 2 + _FIELDS * len(timings)] = torch.tensor(timings, dtype=torch.float64).flatten()
    return vector


def decode(vectors: Sequence[torch.Tensor], plan: StepPlan) -> tuple[bool, list[list[MicroBatchTiming]]]:
    """Return whether any rank was asked to stop, and the timings of every rank."""
    return any(bool(vector[0]) for vector in vectors), [_timings_of(vector, plan) for vector in vectors]


def _timings_of(vector: torch.Tensor, plan: StepPlan) -> list[MicroBatchTiming]:
    count = int(vector[1])
    rows = vector[2 : 2 + _FIELDS * count].view(count, _FIELDS).tolist()
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
    plan: StepPlan, timings: Sequence[tuple[int, float, float]], *, stop: bool
) -> tuple[bool, list[list[MicroBatchTiming]]]:
    """Send this rank's timings and stop request to all; return those of all ranks, the same on every rank."""
    mine = encode(timings, stop=stop, most=most_microbatches(plan))
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return decode(gathered, plan)
