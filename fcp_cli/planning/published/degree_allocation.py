"""Optimal degrees for the packs of a wave (stage 2 of the FCP paper), faster than its dynamic programme.

Tests compare it with the paper's recurrence and Algorithm 1: the makespans are equal.

The input is a table of seconds [packs, num_ranks]: entry [i, d - 1] is the time of pack i on a group of at most d
ranks, infinite below its least degree. "At most" makes the rows non-increasing. It also resolves an inconsistency of
the paper, whose condition (6) allows ranks to idle while Algorithm 1 hands out exactly N. `degrees_used` maps "at most"
back to the degree that attains the time.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray


def at_most_table(seconds: FloatArray) -> FloatArray:
    """Return the least time on at most d ranks from the time on exactly d ranks; both [packs, num_ranks]."""
    return np.asarray(np.minimum.accumulate(seconds, axis=1))


def degrees_used(seconds: FloatArray, allocated: IntArray) -> IntArray:
    """Return [packs] the least degree that attains the time of each allocation; `seconds` is for exactly d ranks."""
    allowed = np.arange(seconds.shape[1]) < allocated[:, None]
    return np.asarray(np.argmin(np.where(allowed, seconds, np.inf), axis=1) + 1)


def allocate_by_threshold(table: FloatArray, num_ranks: int) -> IntArray:
    """Return [packs] the degrees with the least makespan, by bisection over the times in the table.

    A makespan T is feasible if and only if the least degrees that finish every pack within T sum to at most
    `num_ranks`. Each step, in O(packs * num_ranks), halves the interval and moves its ends to times in the table, so
    the answer is exact.
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
    """Return [packs] the least degree that finishes each pack within `seconds`."""
    return np.asarray((table > seconds).sum(axis=1) + 1)


def _attained(table: FloatArray, degrees: IntArray) -> float:
    return float(table[np.arange(len(table)), degrees - 1].max())
