"""Degrees for the packs of a wave as the FCP paper has them: its recurrence, and its Algorithm 1 as printed.

Both read the table of `fcp_cli.planning.strategies.fcp_paper`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fcp_cli.util.arrays import FloatArray, IntArray


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
