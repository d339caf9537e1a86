"""`--robust`: waves with the same groups, placed so that few rings that cross nodes share a node's network.

A ring across nodes takes whole nodes, and its rest the node with the fewest other such rings; all other groups stay
inside nodes, as long as one has room. Another group than before may then have to cross nodes: the price must be
computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.drafts import FunctionSolver
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver

MOST_LOSS: Final = 0.005
"""Of the predicted seconds: extra time that a step whose rings are spread may take."""


def spread_solver(plain: Solver, problem: Problem) -> FunctionSolver:
    """Make a solver that spreads the rings of another's waves, if that costs next to nothing."""
    return FunctionSolver(name="fcp", problem=problem, rule=partial(_spread, plain), options={"robust": True})


def _spread(plain: Solver, batch: Batch, problem: Problem) -> Assignment:
    answer = plain.assign(batch)
    spread = spread_cross_node_rings(answer, num_ranks=problem.num_ranks, ranks_per_node=problem.ranks_per_node)
    most = (1.0 + MOST_LOSS) * makespan_seconds(answer, batch, problem)
    return spread if makespan_seconds(spread, batch, problem) <= most else answer


def spread_cross_node_rings(answer: Assignment, *, num_ranks: int, ranks_per_node: int) -> Assignment:
    """Place the groups of each wave anew."""
    ranks, degrees = answer.ranks.copy(), np.diff(answer.rank_offsets)
    bounds = [0, *(np.flatnonzero(np.diff(answer.wave)) + 1).tolist(), len(answer.wave)]
    for first, stop in pairwise(bounds):
        placed = _placed(degrees[first:stop], num_ranks, ranks_per_node)
        ranks[answer.rank_offsets[first] : answer.rank_offsets[stop]] = np.concatenate(placed)
    return replace(answer, ranks=ranks)


def _placed(degrees: IntArray, num_ranks: int, per_node: int) -> list[IntArray]:
    """Return ascending ranks for each group of a wave."""
    nodes = [list(range(at, min(at + per_node, num_ranks))) for at in range(0, num_ranks, per_node)]
    rings = [0] * len(nodes)  # across nodes, that touch each node
    groups: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(degrees)
    for group in np.argsort(-degrees, kind="stable").tolist():
        degree = int(degrees[group])
        inside = degree <= per_node
        taken: list[int] = []
        while degree:
            room = [node for node in range(len(nodes)) if len(nodes[node]) >= min(degree, per_node)]
            if not room:  # over the nodes with the most room
                inside, room = False, [max(range(len(nodes)), key=lambda at: len(nodes[at]))]
            # Whole nodes are all equal; a remainder goes to a node with few crossing rings, a group inside to the
            # tightest fit.
            node = min(room, key=lambda at: (0 if inside else rings[at], len(nodes[at]), at))
            part = min(degree, len(nodes[node]))
            taken += nodes[node][:part]
            del nodes[node][:part]
            rings[node] += not inside
            degree -= part
        groups[group] = np.array(sorted(taken))
    return groups
