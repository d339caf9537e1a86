"""Problems and batches as the compiled code wants them."""

from __future__ import annotations

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.plan.step import Int64Array
from fcp_cli.planning.compiled.core import Machine, Sequences
from fcp_cli.planning.problem import Problem


def machine_of(problem: Problem, rank_sets: list[range] | None = None) -> Machine:
    """Ranks, budget and cost of a problem; rings may use the given rank sets (widest first) only, or any."""
    c, bandwidth = problem.profile.coefficients, problem.profile.bandwidth
    sets = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64), np.ones(problem.num_ranks + 1, dtype=np.int64)
    if rank_sets:
        sets = _back_to_back(rank_sets, problem.num_ranks)
    return Machine(
        num_ranks=problem.num_ranks,
        ranks_per_node=min(problem.ranks_per_node, problem.num_ranks),
        tokens_per_rank=problem.tokens_per_rank,
        beta=c.microbatch_seconds,
        intra=c.ring_bytes_per_token / bandwidth.intra_node,
        inter=c.ring_bytes_per_token / bandwidth.inter_node,
        hop=c.ring_hop_seconds,
        exposed=c.exposed_ring_share,
        padding=problem.padding_multiple or 0,
        padding_seconds=c.linear_seconds_per_token,
        group_first=sets[0],
        group_ranks=sets[1],
        allowed=sets[2],
    )


def in_batch_order(work: Work) -> Sequences:
    """The sequences as they stand in the batch."""
    return Sequences(
        attention=work.attention_seconds, linear=work.linear_seconds, work=work.total_seconds, tokens=work.tokens
    )


def by_falling_work(work: Work) -> tuple[Int64Array, Sequences]:
    """Positions in the batch by falling work (ties by position), and the sequences in that order."""
    total = work.total_seconds
    order = np.argsort(-total, kind="stable")
    return order, Sequences(
        attention=work.attention_seconds[order],
        linear=work.linear_seconds[order],
        work=total[order],
        tokens=work.tokens[order],
    )


def _back_to_back(sets: list[range], num_ranks: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The sets back to back (offsets, ranks), and which degrees they have ([num_ranks + 1], 1 or 0)."""
    first = np.concatenate(([0], np.cumsum([len(block) for block in sets], dtype=np.int64)))
    ranks = np.concatenate([np.arange(block.start, block.stop) for block in sets]).astype(np.int64)
    allowed = np.zeros(num_ranks + 1, dtype=np.int64)
    allowed[[1, *(len(block) for block in sets)]] = 1
    return first, ranks, allowed
