"""`distca`: attention as tasks on any ranks, separate from the rest of the layers, from DistCA (arXiv 2510.18121).

Core attention disaggregation runs a layer in two parts. All ranks hold equally many tokens, with sequences cut at rank
boundaries. Attention is cut into tasks, each some queries of a sequence with all keys before them, and any rank may run
a task. Queries, keys and values travel to the rank of the task and outputs travel back. Two halves of a micro-batch
alternate, so the messages of one hide behind the computation of the other. Priced by `spread_attention`.

Tasks are moved by the planner of the published code (hao-ai-lab/DistCA). Ranks with the least attention come first.
Each takes, from ranks above the mean, the tasks that move the fewest bytes per second of attention, until it lacks less
than `tolerance` of the mean. Weights are seconds of the cost profile, and a moved task costs a further kernel. The
memory of a rank is that of its own tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.cost.profile import Heads
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.strategies.spread_attention import SpreadAttention, Tasks, attention_per_token, laid_out, tuned
from fcp_cli.util.arrays import FloatArray, IntArray

_TOLERANCE: Final = 0.1  # the published planner's default
_ROUNDING: Final = 1e-9  # of the mean attention of a rank: less is a rounding error, not a task


def make_solver(batches: GlobalBatches, *, ping_pong: bool = True) -> SpreadAttention:
    """Make the strategy, with all ranks as one group; see `tuned` for errors."""
    rule = partial(_rank_seconds, ping_pong=ping_pong)
    return tuned("distca", batches, rule, degrees=[batches.problem.num_ranks], tolerance=_TOLERANCE)


def _rank_seconds(spread: SpreadAttention, work: Work, *, ping_pong: bool) -> FloatArray:
    """Return [ranks] the seconds of a micro-batch on each rank."""
    tasks = laid_out(work.tokens, spread.degree)
    rebalanced(tasks, attention_per_token(work), work.tokens, spread.heads, spread.degree)
    return spread.task_seconds(tasks, work, (tasks.rank != tasks.home).astype(np.float64), ping_pong=ping_pong)


def rebalanced(tasks: Tasks, per_token: FloatArray, lengths: IntArray, heads: Heads, ranks: int) -> None:
    """Move tasks or parts of them, in place, to ranks with too little attention.

    Args:
        tasks: the tasks of a micro-batch.
        per_token: [sequences] attention seconds per query.
        lengths: [sequences] tokens.
        heads: bytes of queries and keys.
        ranks: number of ranks.
    """
    load = np.bincount(tasks.rank, tasks.tokens * per_token[tasks.sequence], ranks)
    mean = float(load.mean())
    surplus = load - mean
    for rank in np.argsort(surplus, kind="stable").tolist():
        while -surplus[rank] > _TOLERANCE * mean:
            seconds = tasks.tokens * per_token[tasks.sequence]
            most = np.minimum(np.minimum(seconds, -surplus[rank]), surplus[tasks.rank])
            able = np.flatnonzero(most > _ROUNDING * mean)
            if not len(able):
                break
            of = tasks.sequence[able]
            queries = most[able] / per_token[of] * heads.exchange_bytes_per_token
            moved_bytes = queries + lengths[of] * heads.key_value_exchange_bytes_per_token
            best = int(able[np.argmin(moved_bytes / most[able])])
            surplus[tasks.rank[best]] -= most[best]
            surplus[rank] += most[best]
            tasks.hand_over(best, rank, share=float(most[best] / seconds[best]))
