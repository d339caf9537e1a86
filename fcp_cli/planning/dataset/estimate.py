"""Estimates a plan's time and size from a few of its steps, before all are planned."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.plan.file.schema import steps_to_arrow
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Solver
from fcp_cli.words import counted, duration

_SAMPLED_SEQUENCES: Final = 1 << 14
_FROM_SEQUENCES: Final = 2_000_000  # shorter plans are there before anybody has read about them


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanEstimate:
    """Time and size of a plan of so many steps and sequences, on so many processes."""

    steps: int
    sequences: int
    workers: int
    seconds: float
    size_bytes: float

    def __str__(self) -> str:
        return (
            f"planning {counted(self.steps, 'step')} of {counted(self.sequences, 'sequence')} takes about "
            f"{duration(self.seconds)} on {counted(self.workers, 'core')}; "
            f"the plan has about {self.size_bytes / 1e6:,.0f} MB"
        )


def estimate_plan(batches: GlobalBatches, numbers: range, solver: Solver, workers: int) -> PlanEstimate | None:
    """Plan a few steps and estimate all; None for a plan that is too short to be worth it.

    Args:
        batches: the batches of the whole plan.
        numbers: the batches that will be planned, of which the first are sampled.
        solver: the solver of the plan.
        workers: number of processes.
    """
    size = batches.settings.global_batch_size
    if len(numbers) * size < _FROM_SEQUENCES:
        return None
    sample = numbers[: max(2, min(16, _SAMPLED_SEQUENCES // size))]
    batches.batch(sample[0])  # which reads the window of all of them
    planned: list[StepPlan] = []
    began = 0.0
    for number in (sample[0], *sample):  # the first loads the compiled planner
        if len(planned) == 1:
            began = time.perf_counter()
        batch = batches.batch(number)
        planned.append(assemble(solver.assign(batch), batch, batches.problem))
    seconds = (time.perf_counter() - began) / len(sample)
    sink = pa.BufferOutputStream()
    pq.write_table(steps_to_arrow(planned[1:]), sink, compression="zstd")
    return PlanEstimate(
        steps=len(numbers),
        sequences=len(numbers) * size,
        workers=workers,
        seconds=seconds * len(numbers) / workers,
        size_bytes=len(sink.getvalue()) / len(sample) * len(numbers),
    )
