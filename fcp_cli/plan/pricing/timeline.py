"""Predicted timeline of a step: start of each micro-batch and end of the step, from their seconds and the sync."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.cost.profile import StepTerms
from fcp_cli.plan.pricing.prices import Prices
from fcp_cli.plan.pricing.setup import PlanSetup, Sync

NO_TERMS: Final = StepTerms()


class Times(NamedTuple):
    """Start of each micro-batch ([microbatches] seconds from the step's start), and end of the step.

    In pipelines a micro-batch starts with the forward of its first block. `stuck` lists deadlocked micro-batches, whose
    replicas wait for each other in a cycle; the makespan is then infinite.
    """

    start_seconds: FloatArray
    makespan_seconds: float
    stuck: tuple[int, ...] = ()


def priced_times(
    setup: PlanSetup, prices: Prices, terms: StepTerms, *, wave: Int32Array, rank_offsets: IntArray, ranks: Int32Array
) -> Times:
    """Predict a step from the prices of its rows, including idle ones; as pipelines if the setup has one."""
    if setup.pipeline is not None:
        run = setup.pipeline.run(rank_offsets, ranks, prices, stages=setup.pipeline_parallel, num_ranks=setup.num_ranks)
        ends = run.makespan_seconds + terms.closing_seconds(setup.sync)
        return Times(run.forward_start[:, 0], ends, tuple(run.stuck.tolist()))
    return step_times(
        setup.sync,
        wave=wave,
        rank_offsets=rank_offsets,
        ranks=ranks,
        seconds=prices.seconds,
        num_ranks=setup.num_ranks,
        terms=terms,
        encoder_seconds=prices.encoder_seconds,
    )


def step_times(
    sync: Sync,
    *,
    wave: Int32Array,
    rank_offsets: IntArray,
    ranks: Int32Array,
    seconds: FloatArray,
    num_ranks: int,
    terms: StepTerms = NO_TERMS,
    encoder_seconds: FloatArray | None = None,
) -> Times:
    """Predict a step from its micro-batches in their global order.

    Under `iteration` a micro-batch starts when all of its ranks have finished their earlier ones. Under `microbatch` a
    wave starts when the previous wave ends (`wave_seconds`). Gradient reduction and the optimizer follow the last
    micro-batch.

    Args:
        sync: scope of synchronization between ranks.
        wave, rank_offsets, ranks, seconds: the micro-batches; `wave` must ascend under `microbatch`.
        num_ranks: number of ranks of the job.
        terms: step terms of the cost profile.
        encoder_seconds: [microbatches] part of `seconds` in the vision encoder; only used in lockstep.
    """
    closing = terms.closing_seconds(sync)
    if sync == "microbatch":
        first = np.flatnonzero(np.concatenate(([True], wave[1:] != wave[:-1])))  # row 0 also begins a wave
        lasts = wave_seconds(first, seconds, terms, encoder_seconds)
        ends = np.cumsum(lasts)
        start = np.repeat(np.concatenate(([0.0], ends[:-1])), np.diff(first, append=len(wave)))
        return Times(start, float(ends[-1]) + closing)
    start = list_schedule(rank_offsets, ranks, seconds, num_ranks)
    return Times(start, float((start + seconds).max()) + closing)


def wave_seconds(
    first: IntArray, seconds: FloatArray, terms: StepTerms = NO_TERMS, encoder_seconds: FloatArray | None = None
) -> FloatArray:
    """Return [waves] the seconds of each: its slowest micro-batch, or in lockstep the sum of each module's slowest.

    Args:
        first: [waves] first micro-batch of each wave.
        seconds, terms, encoder_seconds: see `step_times`.
    """
    if terms.lockstep and encoder_seconds is not None:
        language = np.maximum.reduceat(seconds - encoder_seconds, first)
        slowest = np.maximum.reduceat(encoder_seconds, first) + language
    else:
        slowest = np.maximum.reduceat(seconds, first)
    return np.asarray(np.maximum(slowest, terms.floor_seconds("microbatch")))


def list_schedule(rank_offsets: IntArray, ranks: Int32Array, seconds: FloatArray, num_ranks: int) -> FloatArray:
    """Return [microbatches] the starts under `sync: iteration`: in order, each once all its ranks are free."""
    # Plain lists: faster than NumPy calls for a few hundred micro-batches, without numba's compilation.
    free = [0.0] * num_ranks
    starts = [0.0] * len(seconds)
    offsets, members, durations = rank_offsets.tolist(), ranks.tolist(), seconds.tolist()
    for i, duration in enumerate(durations):
        first, stop = offsets[i], offsets[i + 1]
        if stop - first == 1:
            rank = members[first]
            start = free[rank]
            free[rank] = start + duration
        else:
            group = members[first:stop]
            start = max([free[rank] for rank in group])
            end = start + duration
            for rank in group:
                free[rank] = end
        starts[i] = start
    return np.array(starts)
