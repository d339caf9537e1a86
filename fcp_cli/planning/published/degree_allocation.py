"""Optimal degrees for the packs of one wave (stage 2 of the FCP paper), in less time than its dynamic programme takes.

The tests hold it against the paper's recurrence and its Algorithm 1: the makespans are the same.

They read a table of seconds [packs, num_ranks]: entry [i, d - 1] is the time of pack i on a group of at most d ranks,
infinite below its least degree. "At most" makes rows descend, and settles a difference inside the paper: its condition
(6) allows ranks to be left over, its Algorithm 1 hands out exactly N. `degrees_used` turns "at most" back into the
degree that attains the time.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray


def at_most_table(seconds: FloatArray) -> FloatArray:
    """Return the best time with at most d ranks, from the time with exactly d ranks; both [packs, num_ranks]."""
    return np.asarray(np.minimum.accumulate(seconds, axis=1))


def degrees_used(seconds: FloatArray, allocated: IntArray) -> IntArray:
    """[packs] the least degree within each allocation that attains its time; `seconds` is for exactly d ranks."""
    allowed = np.arange(seconds.shape[1]) < allocated[:, None]
    return np.asarray(np.argmin(np.where(allowed, seconds, np.inf), axis=1) + 1)


def allocate_by_threshold(table: FloatArray, num_ranks: int) -> IntArray:
    """[packs] degrees of the least makespan, by bisection over the times that occur in the table.

    A makespan T is feasible exactly if the least degrees that finish every pack within T fit the ranks together. Each
    step halves the interval and moves its ends to times of the table, so the answer is exact: O(packs * num_ranks) a
    step.
    """
    lowest = float(table[:, -1].max())
    degrees = _degrees_for(table, lowest)
    if degrees.sum() <= num_ranks:
        return degrees
    least = np.isinf(table).sum(axis=1) + 1
    assert least.sum() <= num_ranks, "the packs need more ranks than there are"
    degrees, highest = least, _attained(table, least)
    while lowest < highest:
        middle = min((lowest + highest) / 2, np.nextafter(highest, lowest))  # below `highest` even when rounded
        tried = _degrees_for(table, middle)
        if tried.sum() <= num_ranks:
            degrees, highest = tried, _attained(table, tried)
        else:
            lowest = float(table[table > middle].min())
    return degrees


def _degrees_for(table: FloatArray, seconds: float) -> IntArray:
    """Return the least degree that finishes each pack within `seconds`."""
    return np.asarray((table > seconds).sum(axis=1) + 1)


def _attained(table: FloatArray, degrees: IntArray) -> float:
    return float(table[np.arange(len(table)), degrees - 1].max())
