"""Solvers of other packages: a factory takes the plan's global batches and returns a `Solver`.

    [project.entry-points."fcp.solvers"]
    longest-first = "longest_first:make_solver"

A solver returns groups, packs and one global order, never times: seconds, idle rows, makespan and lower bound are
computed from its answer by the same code for all solvers. Every answer is checked against the rules of a plan.
`place_waves` turns waves of (degree, sequences) into an answer; `packs_of` packs sequences that a group holds
together; `work_on` gives the sequences' work, and their tokens with padding, on groups of some degree.
"""

from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.drafts import packs_of, place_waves
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.planning.solvers import SolverFactory
from fcp_cli.planning.work import work_on

__all__ = [
    "Assignment",
    "Batch",
    "GlobalBatches",
    "Problem",
    "Solver",
    "SolverFactory",
    "makespan_seconds",
    "packs_of",
    "place_waves",
    "work_on",
]
