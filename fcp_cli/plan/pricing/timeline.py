"""Predicts when each micro-batch starts and the step ends: from seconds, where ranks wait, and the profile's terms."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.cost.profile import StepTerms
from fcp_cli.plan.pricing.prices import Prices
from fcp_cli.plan.pricing.setup import PlanSetup, Sync

NO_TERMS: Final = StepTerms()


class Times(NamedTuple):
    """When the micro-batches of a step start ([microbatches] seconds from its start), and when the step ends.

    In pipelines a micro-batch starts with the forward of its first block; `stuck` are those that never end, because
    their replicas wait for each other in a circle, and the step's end is infinite where there are any.
    """

    start_seconds: FloatArray
    makespan_seconds: float
    stuck: tuple[int, ...] = ()


def priced_times(
    setup: PlanSetup, prices: Prices, terms: StepTerms, *, wave: Int32Array, rank_offsets: IntArray, ranks: Int32Array
) -> Times:
    """Predict a step from the costs of its micro-batches, including idle rows: as pipelines if ranks have stages."""
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

    Under `iteration` a micro-batch starts when the last of its ranks has finished its earlier ones; under `microbatch`
    a wave starts when the wave before has ended (`wave_seconds`). The end of a step (gradients, optimizer) follows its
    last micro-batch.

    Args:
        sync: the sync where ranks wait for each other.
        wave, rank_offsets, ranks, seconds: describe the micro-batches; `wave` ascends under `microbatch`.
        num_ranks: the number of ranks of the job.
        terms: the terms of the cost profile.
        encoder_seconds: [microbatches] the part of `seconds` that a vision encoder takes, which matters in lockstep.
    """
    closing = terms.closing_seconds(sync)
    if sync == "microbatch":
        first = np.flatnonzero(np.concatenate(([True], wave[1:] != wave[:-1])))  # row 0 begins a wave, too
        lasts = wave_seconds(first, seconds, terms, encoder_seconds)
        ends = np.cumsum(lasts)
        start = np.repeat(np.concatenate(([0.0], ends[:-1])), np.diff(first, append=len(wave)))
        return Times(start, float(ends[-1]) + closing)
    start = list_schedule(rank_offsets, ranks, seconds, num_ranks)
    return Times(start, float((start + seconds).max()) + closing)


def wave_seconds(
    first: IntArray, seconds: FloatArray, terms: StepTerms = NO_TERMS, encoder_seconds: FloatArray | None = None
) -> FloatArray:
    """Return [waves] how long each lasts: as its slowest micro-batch, in lockstep as the slowest of each module.

    Args:
        first: [waves] the first micro-batch of each.
        seconds, terms, encoder_seconds: see `step_times`.
    """
    if terms.lockstep and encoder_seconds is not None:
        language = np.maximum.reduceat(seconds - encoder_seconds, first)
        slowest = np.maximum.reduceat(encoder_seconds, first) + language
    else:
        slowest = np.maximum.reduceat(seconds, first)
    return np.asarray(np.maximum(slowest, terms.floor_seconds("microbatch")))


def list_schedule(rank_offsets: IntArray, ranks: Int32Array, seconds: FloatArray, num_ranks: int) -> FloatArray:
    """Return the starts under `sync: iteration`: each micro-batch, in order, as soon as all its ranks are free."""
    # Plain lists: for a few hundred micro-batches they beat NumPy calls, and need no compiler as numba would.
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
