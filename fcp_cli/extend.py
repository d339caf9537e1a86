"""Interfaces for packages that extend fcp with solvers, launch targets and integrations, found by entry points.

A package declares an entry point in its `pyproject.toml`; once it is installed, its names work like built-in ones.
Names exported here are public, and imported on first use: a rank that hooks a framework loads no planner.

    [project.entry-points."fcp.solvers"]
    longest-first = "longest_first:make_solver"

    [project.entry-points."fcp.targets"]
    pbs = "fcp_pbs:TARGET"

    [project.entry-points."fcp.integrations"]
    "my_framework.trainer" = "fcp_my_framework:hook"

**Solvers.** A factory takes the plan's global batches and returns a `Solver`. A solver returns groups, packs and a
global order, never times: common code computes seconds, idle rows, makespan and lower bound of every answer, and checks
it against the rules of a plan. `place_waves` turns waves of (degree, sequences) into an answer; `assignment_of` does so
for micro-batches on chosen ranks (`Draft`). `packs_of` packs sequences for a group; `work_on` returns their work and
padded tokens at a degree. Work / degree approximates the seconds of a pack, without ring and fixed costs;
`makespan_seconds` prices an answer exactly. For tests, `batches_of` provides a batch, and `assemble` checks and prices
an answer.

**Launch targets.** A `Target` has templates of a job's files, and the command that starts the job. Templates are jinja2
with the variables of shipped targets. `variable("NAME")` refers to a shell variable on the node; `quote` and
`kubernetes_word` quote a word for the file.

**Integrations.** A `Hook` is called with a framework's module right after a rank imports it; the entry point's name is
the module's name, and the package is imported only after that module. A hook usually replaces the training function
with one that takes micro-batches from `fcp_cli.runtime.steps`. For transformers models it calls `prepare(model)` first.
If it cannot follow the plan, it raises `RunError`, and the job ends with that one-line message.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.cost.model import Work
    from fcp_cli.errors import PlanError, RunError
    from fcp_cli.launching.job import Job, kubernetes_word, quote, variable
    from fcp_cli.launching.targets import NodeFacts, Target
    from fcp_cli.planning.assemble import assemble, makespan_seconds
    from fcp_cli.planning.batches import GlobalBatches, batches_of
    from fcp_cli.planning.drafts import Draft, assignment_of, packs_of, place_waves
    from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver, work_on
    from fcp_cli.planning.solvers import SolverFactory
    from fcp_cli.runtime.inject import Hook

_MODULES = {
    "fcp_cli.cost.model": ("Work",),
    "fcp_cli.errors": ("PlanError", "RunError"),
    "fcp_cli.launching.job": ("Job", "kubernetes_word", "quote", "variable"),
    "fcp_cli.launching.targets": ("NodeFacts", "Target"),
    "fcp_cli.planning.assemble": ("assemble", "makespan_seconds"),
    "fcp_cli.planning.batches": ("GlobalBatches", "batches_of"),
    "fcp_cli.planning.drafts": ("Draft", "assignment_of", "packs_of", "place_waves"),
    "fcp_cli.planning.problem": ("Assignment", "Batch", "Problem", "Solver", "work_on"),
    "fcp_cli.planning.solvers": ("SolverFactory",),
    "fcp_cli.runtime.inject": ("Hook",),
}

__all__ = [
    "Assignment",
    "Batch",
    "Draft",
    "GlobalBatches",
    "Hook",
    "Job",
    "NodeFacts",
    "PlanError",
    "Problem",
    "RunError",
    "Solver",
    "SolverFactory",
    "Target",
    "Work",
    "assemble",
    "assignment_of",
    "batches_of",
    "kubernetes_word",
    "makespan_seconds",
    "packs_of",
    "place_waves",
    "prepare",
    "quote",
    "variable",
    "work_on",
]


def prepare(model: Any) -> None:
    """Make a transformers model run its attention on the ring of the current micro-batch.

    Call it before wrapping the model (DDP, `fully_shard`).

    Raises:
        RunError: rings cannot compute this model exactly.
    """
    from fcp_cli.runtime.inject import transformers_models

    transformers_models().prepare(model)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
