"""Makes a plan: global batches -> solver -> planned steps -> plan file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fcp_cli import __version__
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.plan.writer import plan_writer
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Batch, Problem, Solver
from fcp_cli.planning.solvers import make_solver

OnStep = Callable[[StepPlan], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """What `make_plan` made.

    Attributes:
        metadata: as written, with totals and hash.
        summary: totals over all steps.
        planning_seconds: wall time, from the solver's set-up to the finished file.
    """

    metadata: PlanMetadata
    summary: PlanSummary
    planning_seconds: float


def make_plan(
    path: Path,
    *,
    table: LengthTable,
    problem: Problem,
    settings: BatchSettings,
    solver_name: str,
    on_step: OnStep | None = None,
) -> PlanResult:
    """Plan every step and write the plan; a plan that stood at `path` is replaced only when the new one is whole.

    Args:
        path: the plan file.
        table: the manifest.
        problem, settings: what to plan for.
        solver_name: one of `solvers.solver_names()`.
        on_step: called after each planned step, for progress.

    Raises:
        OverlongError, ManifestError, UsageError: the input is at fault; nothing was written.
        FcpError: the file cannot be written; nothing is left behind.
    """
    started = time.perf_counter()
    batches = GlobalBatches(table, problem, settings)
    solver = make_solver(solver_name, batches)
    summary = PlanSummary(num_ranks=problem.num_ranks)
    with plan_writer(path, plan_metadata(table, batches, solver)) as writer:
        for step in plan_steps(batches, solver):
            writer.append(step)
            summary.add(step)
            if on_step is not None:
                on_step(step)
    return PlanResult(metadata=writer.metadata, summary=summary, planning_seconds=time.perf_counter() - started)


def plan_steps(batches: GlobalBatches, solver: Solver) -> Iterator[StepPlan]:
    """All steps of a plan, in order."""
    for batch in batches:
        yield plan_step(batch, batches.problem, solver)


def plan_step(batch: Batch, problem: Problem, solver: Solver) -> StepPlan:
    """One step: a pure function of its arguments."""
    return assemble(solver.assign(batch), batch, problem)


def plan_metadata(table: LengthTable, batches: GlobalBatches, solver: Solver) -> PlanMetadata:
    """The plan's metadata, before totals and hash."""
    problem, settings = batches.problem, batches.settings
    return PlanMetadata(
        fcp_version=__version__,
        num_ranks=problem.num_ranks,
        ranks_per_node=problem.ranks_per_node,
        sync=problem.sync,
        global_batch_size=settings.global_batch_size,
        tokens_per_rank=problem.tokens_per_rank,
        seed=settings.seed,
        shuffle=settings.shuffle,
        epochs=settings.epochs,
        last_batch=settings.last_batch,
        step_limit=settings.step_limit,
        overlong=batches.overlong,
        solver=solver.name,
        solver_options=solver.options,
        manifest=ManifestReference(name=table.name, rows=len(table), content_hash=table.content_hash()),
        cost_profile=problem.profile.text,
    )
