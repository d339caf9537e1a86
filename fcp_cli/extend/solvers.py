"""Solvers of other packages: a factory takes the plan's global batches and returns a `Solver`.

    [project.entry-points."fcp.solvers"]
    longest-first = "longest_first:make_solver"

A solver returns groups, packs and one global order, never times: seconds, idle rows, makespan and lower bound are
computed from its answer by the same code for all solvers. Every answer is checked against the rules of a plan.
`place_waves` turns waves of (degree, sequences) into an answer, `assignment_of` micro-batches on ranks of your choice
(`Draft`); `packs_of` packs sequences that a group holds together; `work_on` gives the sequences' work, and their tokens
with padding, on groups of some degree. Work / degree is about the seconds of a pack, without the ring and the fixed
cost of a micro-batch; `makespan_seconds` prices an answer exactly. Tests take a batch from `batches_of`, and `assemble`
checks an answer and prices it.
"""

from fcp_cli.cost.model import Work
from fcp_cli.errors import PlanError
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.baselines.drafts import Draft, assignment_of, packs_of, place_waves
from fcp_cli.planning.batching.batches import GlobalBatches, batches_of
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.planning.solvers import SolverFactory
from fcp_cli.planning.work import work_on

__all__ = [
    "Assignment",
    "Batch",
    "Draft",
    "GlobalBatches",
    "PlanError",
    "Problem",
    "Solver",
    "SolverFactory",
    "Work",
    "assemble",
    "assignment_of",
    "batches_of",
    "makespan_seconds",
    "packs_of",
    "place_waves",
    "work_on",
]
