"""`skrull`: long sequences distributed over a group, short ones local to a rank, from Skrull (NeurIPS 2025).

No code is public; written from a detailed summary of arXiv 2505.19609, not from the paper. All groups have one degree,
and sequences are packed for them by work ("global data scheduling"). In a micro-batch, a sequence is either local,
whole on one rank, or distributed over the group ("distribution-aware context parallelism"). Local ones go, longest
first, to the rank with the least work so far that has room. If none has room, the sequence is distributed; if that
takes room from other ranks, their longest local sequences are distributed, too (its roll-back). The ring of distributed
sequences overlaps with local ones. Priced by `spread_attention`. Choices that the paper leaves open favour it:

- The number of longest sequences that are distributed from the start is the fastest of several, for every micro-batch.
  The paper's heuristic avoids sharding, then balances.
- The ring hides behind local sequences and behind its own attention; the paper counts only the former.
- The degree is the fastest over a sample of the plan's steps.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.strategies.spread_attention import SpreadAttention, tuned
from fcp_cli.util.arrays import FloatArray, IntArray


def make_solver(batches: GlobalBatches) -> SpreadAttention:
    """Make the strategy with the fastest degree over a sample of the steps; see `tuned` for errors."""
    return tuned("skrull", batches, _rank_seconds)


def _rank_seconds(spread: SpreadAttention, work: Work) -> FloatArray:
    """Return [degree] the seconds of a micro-batch on each rank."""
    n, counts = len(work.tokens), {0}
    if spread.degree > 1:
        counts |= {n, *(count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64) if count < n)}
    owners = [
        local_ranks(work.tokens, work.total_seconds, spread.degree, spread.problem.tokens_per_rank, num_shared=count)
        for count in sorted(counts)
    ]
    return min((_priced(spread, owner, work) for owner in owners), key=lambda found: float(found.max()))


def _priced(spread: SpreadAttention, owner: IntArray, work: Work) -> FloatArray:
    degree, coefficients = spread.degree, spread.problem.profile.coefficients
    is_shared, is_local = owner < 0, owner >= 0
    local_seconds = np.bincount(owner[is_local], work.total_seconds[is_local], degree)
    received_tokens = float(work.tokens[is_shared].sum()) * (degree - 1) / degree
    group_seconds = (
        float(work.total_seconds[is_shared].sum()) / degree + coefficients.chunk_seconds_per_token * received_tokens
    )
    linear_seconds = float(work.linear_seconds[is_shared].sum()) / degree
    bandwidth = spread.problem.profile.bandwidth
    is_intra_node = degree <= spread.problem.ranks_per_node
    bytes_per_second = bandwidth.intra_node if is_intra_node else bandwidth.inter_node
    ring_seconds = received_tokens * coefficients.ring_bytes_per_token / bytes_per_second
    ring_seconds += coefficients.ring_hop_seconds * (degree - 1) if received_tokens else 0.0
    # A ring overlaps with everything but the matrices of distributed sequences.
    overlapped_seconds = np.maximum(local_seconds + group_seconds - linear_seconds, ring_seconds)
    return np.asarray(coefficients.microbatch_seconds + linear_seconds + overlapped_seconds)


def local_ranks(tokens: IntArray, seconds: FloatArray, ranks: int, limit: int, *, num_shared: int) -> IntArray:
    """Return [sequences] the rank of each local sequence, or -1 if it is distributed over the group.

    Requires sum(tokens) <= ranks * limit; otherwise the roll-back never ends.

    Args:
        tokens: [sequences] tokens of each.
        seconds: [sequences] seconds of each on one rank.
        ranks: number of ranks in the group.
        limit: token budget of a rank.
        num_shared: number of longest sequences that are distributed from the start.
    """
    order = np.argsort(-tokens, kind="stable").tolist()
    owner = np.full(len(tokens), -1, dtype=np.int64)
    rank_seconds, rank_tokens = np.zeros(ranks), np.zeros(ranks)
    group_tokens = float(tokens[order[:num_shared]].sum())
    for sequence in order[num_shared:]:
        has_room = rank_tokens + tokens[sequence] + group_tokens / ranks <= limit
        if has_room.any():
            rank = int(np.where(has_room, rank_seconds, np.inf).argmin())
            owner[sequence] = rank
            rank_seconds[rank] += seconds[sequence]
            rank_tokens[rank] += tokens[sequence]
            continue
        group_tokens += tokens[sequence]
        while rank_tokens.max() + group_tokens / ranks > limit:
            fullest = int(rank_tokens.argmax())
            longest = int(np.where(owner == fullest, tokens, -1).argmax())
            owner[longest] = -1
            rank_seconds[fullest] -= seconds[longest]
            rank_tokens[fullest] -= tokens[longest]
            group_tokens += tokens[longest]
    return owner
