"""Problems and batches as the compiled code wants them."""

from __future__ import annotations

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.plan.step import Int64Array
from fcp_cli.planning.fcp.catalogue import flat
from fcp_cli.planning.fcp.core import Machine, Sequences
from fcp_cli.planning.problem import Problem


def machine_of(problem: Problem, rank_sets: list[range] | None = None) -> Machine:
    """Ranks, budget and cost of a problem; rings may use the given rank sets (widest first) only, or any."""
    c, bandwidth = problem.profile.coefficients, problem.profile.bandwidth
    sets = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64), np.ones(problem.num_ranks + 1, dtype=np.int64)
    if rank_sets:
        sets = flat(rank_sets, problem.num_ranks)
    return Machine(
        num_ranks=problem.num_ranks,
        per_node=min(problem.ranks_per_node, problem.num_ranks),
        budget=problem.tokens_per_rank,
        beta=c.microbatch_seconds,
        intra=c.ring_bytes_per_token / bandwidth.intra_node,
        inter=c.ring_bytes_per_token / bandwidth.inter_node,
        hop=c.ring_hop_seconds,
        exposed=c.exposed_ring_share,
        padding=problem.padding_multiple or 0,
        padding_seconds=c.linear_seconds_per_token,
        set_first=sets[0],
        set_ranks=sets[1],
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
