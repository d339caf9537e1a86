"""Problems and batches as the compiled code wants them."""

from __future__ import annotations

import numpy as np

from fcp_cli.cost.model import Work
from fcp_cli.plan.step import Int64Array
from fcp_cli.planning.fcp.core import Machine, Sequences
from fcp_cli.planning.problem import Problem


def machine_of(problem: Problem) -> Machine:
    """Ranks, budget and cost of a problem."""
    c, bandwidth = problem.profile.coefficients, problem.profile.bandwidth
    return Machine(
        num_ranks=problem.num_ranks,
        per_node=min(problem.ranks_per_node, problem.num_ranks),
        budget=problem.tokens_per_rank,
        beta=c.microbatch_seconds,
        intra=c.ring_bytes_per_token / bandwidth.intra_node,
        inter=c.ring_bytes_per_token / bandwidth.inter_node,
        hop=c.ring_hop_seconds,
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
