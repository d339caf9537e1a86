"""Third-party solvers: a factory takes the plan's global batches and returns a `Solver`.

    [project.entry-points."fcp.solvers"]
    longest-first = "longest_first:make_solver"

A solver returns groups, packs and a global order, never times: common code computes seconds, idle rows, makespan and
lower bound of every answer, and checks it against the rules of a plan.

- `place_waves` turns waves of (degree, sequences) into an answer; `assignment_of` does so for micro-batches on chosen
  ranks (`Draft`).
- `packs_of` packs sequences for a group; `work_on` returns their work and padded tokens at a degree. Work / degree
  approximates the seconds of a pack, without ring and fixed costs; `makespan_seconds` prices an answer exactly.
- For tests, `batches_of` provides a batch, and `assemble` checks and prices an answer.
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
