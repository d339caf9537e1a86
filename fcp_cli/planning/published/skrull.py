"""`skrull`: long sequences distributed over a group, short ones local to a rank, from Skrull (NeurIPS 2025).

No code is public; this is based on a detailed account of the paper (arXiv 2505.19609), not on its text. All groups have
one degree, and sequences are packed for them by work ("global data scheduling"). In a micro-batch, a sequence is either
local, whole on one rank, or distributed over the group ("distribution-aware context parallelism"). Local ones go,
longest first, to the rank with the least work so far that has room. If none has room, the sequence is distributed; if
that takes room from other ranks, their longest local sequences are distributed, too (its roll-back). The ring of
distributed sequences overlaps with local ones. Priced by `spread_attention`. Choices that the paper leaves open favour
it:

- The number of longest sequences that are distributed from the start is the fastest of several, for every micro-batch.
  The paper's heuristic avoids sharding, then balances.
- The ring hides behind local sequences and behind its own attention; the paper counts only the former.
- The degree is the fastest over a sample of the plan's steps.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import Work
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.published.spread_attention import SpreadAttention, tuned


def make_solver(batches: GlobalBatches) -> SpreadAttention:
    """Make the strategy with the fastest degree over a sample of the steps; see `tuned` for errors."""
    return tuned("skrull", batches, _rank_seconds)


def _rank_seconds(spread: SpreadAttention, work: Work) -> FloatArray:
    """Return [degree] the seconds of a micro-batch on each rank."""
    n, seconds = len(work.tokens), work.total_seconds
    tried = sorted({0, n, *(count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if count < n)})
    if spread.degree == 1:
        tried = [0]
    owners = [
        local_ranks(work.tokens, seconds, spread.degree, spread.problem.tokens_per_rank, shared=count)
        for count in tried
    ]
    return min((_priced(spread, owner, work) for owner in owners), key=lambda found: float(found.max()))


def _priced(spread: SpreadAttention, owner: IntArray, work: Work) -> FloatArray:
    degree, c = spread.degree, spread.problem.profile.coefficients
    shared, local = owner < 0, owner >= 0
    alone = np.bincount(owner[local], work.total_seconds[local], degree)
    further = float(work.tokens[shared].sum()) * (degree - 1) / degree
    together = float(work.total_seconds[shared].sum()) / degree + c.chunk_seconds_per_token * further
    linear = float(work.linear_seconds[shared].sum()) / degree
    bandwidth = spread.problem.profile.bandwidth
    inside = degree <= spread.problem.ranks_per_node
    ring = further * c.ring_bytes_per_token / (bandwidth.intra_node if inside else bandwidth.inter_node)
    ring += c.ring_hop_seconds * (degree - 1) if further else 0.0
    return np.asarray(c.microbatch_seconds + linear + np.maximum(alone + together - linear, ring))


def local_ranks(tokens: IntArray, seconds: FloatArray, ranks: int, limit: int, *, shared: int) -> IntArray:
    """Return [sequences] the rank of each local sequence, or -1 if it is distributed over the group.

    Args:
        tokens: [sequences] tokens, in total at most `ranks` x `limit`.
        seconds: [sequences] seconds of each on one rank.
        ranks: number of ranks in the group.
        limit: token budget of a rank.
        shared: number of longest sequences that are distributed from the start.
    """
    order = np.argsort(-tokens, kind="stable").tolist()
    owner = np.full(len(tokens), -1, dtype=np.int64)
    load, held = np.zeros(ranks), np.zeros(ranks)
    together = float(tokens[order[:shared]].sum())
    for sequence in order[shared:]:
        room = held + tokens[sequence] + together / ranks <= limit
        if room.any():
            rank = int(np.where(room, load, np.inf).argmin())
            owner[sequence] = rank
            load[rank] += seconds[sequence]
            held[rank] += tokens[sequence]
            continue
        together += tokens[sequence]
        while held.max() + together / ranks > limit:
            fullest = int(held.argmax())
            longest = int(np.where(owner == fullest, tokens, -1).argmax())
            owner[longest] = -1
            load[fullest] -= seconds[longest]
            held[fullest] -= tokens[longest]
            together += tokens[longest]
    return owner
