"""Predicts when each micro-batch starts, from the seconds it takes and where ranks wait for each other."""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.plan.metadata import Sync


def start_times(
    sync: Sync,
    *,
    wave: Int32Array,
    rank_offsets: IntArray,
    ranks: Int32Array,
    seconds: FloatArray,
    num_ranks: int,
) -> FloatArray:
    """Return [microbatches] the predicted start of each micro-batch, in seconds from the start of the step.

    Under `iteration` a micro-batch starts when the last of its ranks has finished its earlier ones; under `microbatch`
    a wave starts when the slowest micro-batch of the wave before has ended.
    """
    if sync == "microbatch":
        return wave_start_times(wave, seconds)
    return list_schedule(rank_offsets, ranks, seconds, num_ranks)


def wave_start_times(wave: Int32Array, seconds: FloatArray) -> FloatArray:
    """Return the starts under `sync: microbatch`; `wave` ascends."""
    first = np.flatnonzero(np.concatenate(([True], wave[1:] != wave[:-1])))  # row 0 begins a wave, too
    slowest = np.maximum.reduceat(seconds, first)
    starts = np.concatenate(([0.0], np.cumsum(slowest)[:-1]))
    return np.repeat(starts, np.diff(first, append=len(wave)))


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
