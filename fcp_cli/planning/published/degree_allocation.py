"""Optimal degrees for the packs of one wave (stage 2 of the FCP paper), three ways that give the same makespan.

All three read a table of seconds [packs, num_ranks]: entry [i, d - 1] is the time of pack i on a group of at most d
ranks, infinite below its least degree. "At most" makes rows descend, and settles a difference inside the paper: its
condition (6) allows ranks to be left over, its Algorithm 1 hands out exactly N. `degrees_used` turns "at most" back
into the degree that attains the time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fcp_cli.manifest.table import FloatArray, IntArray


def at_most_table(seconds: FloatArray) -> FloatArray:
    """The best time with at most d ranks, from the time with exactly d ranks; both [packs, num_ranks]."""
    return np.asarray(np.minimum.accumulate(seconds, axis=1))


def degrees_used(seconds: FloatArray, allocated: IntArray) -> IntArray:
    """[packs] the least degree within each allocation that attains its time; `seconds` is for exactly d ranks."""
    allowed = np.arange(seconds.shape[1]) < allocated[:, None]
    return np.asarray(np.argmin(np.where(allowed, seconds, np.inf), axis=1) + 1)


def allocate_by_threshold(table: FloatArray, num_ranks: int) -> IntArray:
    """[packs] degrees of the least makespan, by bisection over the times that occur in the table.

    A makespan T can be met exactly if the least degrees that bring every pack to T fit the ranks together. Each step
    halves the interval and moves its ends to times of the table, so the answer is exact: O(packs * num_ranks) a step.
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
    """The least degree that brings each pack to `seconds`."""
    return np.asarray((table > seconds).sum(axis=1) + 1)


def _attained(table: FloatArray, degrees: IntArray) -> float:
    return float(table[np.arange(len(table)), degrees - 1].max())


def allocate_by_dynamic_programme(table: FloatArray, num_ranks: int) -> IntArray:
    """[packs] degrees by the recurrence of Eq. 11: DP[i][j] = min over d of max(DP[i - 1][j - d], T(i, d)).

    O(packs * num_ranks^2), one vector operation per pack and degree.
    """
    packs = len(table)
    best = np.full((packs + 1, num_ranks + 1), np.inf)
    choice = np.zeros((packs + 1, num_ranks + 1), dtype=np.int64)
    best[0, 0] = 0.0
    for i in range(1, packs + 1):
        for d in range(1, num_ranks + 1):
            cost = np.maximum(best[i - 1, : num_ranks + 1 - d], table[i - 1, d - 1])
            better = cost < best[i, d:]
            best[i, d:][better] = cost[better]
            choice[i, d:][better] = d
    return _backtrack(choice, packs, num_ranks)


def allocate_as_printed(table: FloatArray, num_ranks: int) -> IntArray:
    """[packs] degrees by Algorithm 1 of the FCP paper, line by line.

    As printed, the backtracking starts at p = K' + 1, q = N + 1: outside the table, whose indices end at K' and N (as
    the paper's own text says, "we backtrack from DP[K'][N]"). It is mended here by starting there.
    """
    packs = len(table)
    d_min = [0, *(np.isinf(table).sum(axis=1) + 1).tolist()]  # 1-based, as in the paper
    dp: npt.NDArray[np.float64] = np.full((packs + 1, num_ranks + 1), np.inf)
    path = np.zeros((packs + 1, num_ranks + 1), dtype=np.int64)
    dp[0][0] = 0.0
    for k in range(1, packs + 1):
        remaining = sum(d_min[k + 1 :])
        for j in range(sum(d_min[1 : k + 1]), num_ranks - remaining + 1):
            for d in range(d_min[k], j - sum(d_min[1:k]) + 1):
                cost = max(dp[k - 1][j - d], table[k - 1][d - 1])
                if cost < dp[k][j]:
                    dp[k][j] = cost
                    path[k][j] = d
    return _backtrack(path, packs, num_ranks)


def _backtrack(path: IntArray, packs: int, num_ranks: int) -> IntArray:
    degrees = np.zeros(packs, dtype=np.int64)
    q = num_ranks
    for p in range(packs, 0, -1):
        degrees[p - 1] = path[p, q]
        q -= int(path[p, q])
    return degrees
