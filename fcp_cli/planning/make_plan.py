"""Planning run: global batches -> solver -> planned steps -> plan file."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fcp_cli import __version__
from fcp_cli.errors import Interrupted
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_step
from fcp_cli.plan.file import plan_writer
from fcp_cli.plan.metadata import Baselines, ManifestReference, PlanMetadata, planned_masks
from fcp_cli.plan.step import StepPlan
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.journal import PlanJournal
from fcp_cli.planning.problem import Batch, Problem, Solver
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.solvers import make_planning_solver
from fcp_cli.util.compiling import timed_loading
from fcp_cli.util.machine import usable_cores
from fcp_cli.util.pool import in_order

OnStep = Callable[[StepPlan], None]
_JOURNAL_FROM_STEPS = 1000  # shorter plans are faster to redo than to resume
_STEPS_PER_TASK, _SEQUENCES_PER_TASK = 32, 1 << 18  # limits of a task, whichever is reached first
_SEQUENCES_PER_WORKER = 1_000_000  # several seconds of planning, which outweigh a process start

# Set once per worker process: a step is a pure function of its batch, so that only batches are sent to the workers.
_solver: Solver | None = None
_problem: Problem | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """A finished plan.

    Attributes:
        metadata: metadata as written, with totals and hash.
        summary: totals over all steps.
        planning_seconds: wall time from solver set-up to the finished file, excluding `loading_seconds`.
        loading_seconds: time to load or compile the compiled planner in this process.
        solver: solver of the plan.
    """

    metadata: PlanMetadata
    summary: PlanSummary
    planning_seconds: float
    loading_seconds: float
    solver: Solver

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for `--json`."""
        metadata = self.metadata
        names = (
            *("plan_hash", "solver", "solver_options", "num_ranks", "ranks_per_node", "tensor_parallel"),
            *("pipeline_parallel", "tokens_per_rank", "padding_multiple", "sync", "recipe"),
            *("global_batch_size", "distinct_groups"),
        )
        return {
            **{name: getattr(metadata, name) for name in names},
            "solver_options": dict(metadata.solver_options),
            "recipe": metadata.recipe and asdict(metadata.recipe),
            **self.summary.to_json(),
        }


def make_plan(
    path: Path,
    inputs: PlanInputs,
    *,
    baselines: Baselines | None = None,
    on_step: OnStep | None = None,
    workers: int | None = None,
    resume: bool = False,
) -> PlanResult:
    """Plan every step and write the plan, atomically replacing an existing file at `path`.

    While a plan of many steps is being made, a journal next to `path` keeps its finished steps.

    Args:
        path: plan file.
        inputs: manifest, problem and batch settings; its request names the solver and limits of rings.
        baselines: step times of other strategies, to be recorded.
        on_step: callback after each planned step, for progress.
        workers: number of planning processes; None: `default_workers`. The plan does not depend on it.
        resume: whether to continue from the journal of an interrupted run with the same inputs; the plan is the same.

    Raises:
        OverlongError, ManifestError, UsageError: invalid input; nothing was written.
        FcpError: the file cannot be written (no partial file is left), or there is nothing to resume.
        Interrupted: Ctrl-C; no plan was written, and the message says whether --resume can continue.
    """
    started = time.perf_counter()
    batches = inputs.batches()
    solver = make_planning_solver(inputs.request.solver, batches, **inputs.request.limits)
    metadata = replace(plan_metadata(inputs.table, batches, solver), baselines=baselines)
    journal = PlanJournal(path, metadata) if resume or len(batches) >= _JOURNAL_FROM_STEPS else None
    summary = PlanSummary.of(metadata)
    workers = workers or default_workers(len(batches), batches.settings.global_batch_size)
    try:
        with plan_writer(path, metadata) as writer, timed_loading() as loading_seconds:
            for step in _journalled_steps(batches, solver, workers, journal, resume):
                writer.append(step)
                summary.add(step)
                if on_step is not None:
                    on_step(step)
    except KeyboardInterrupt:
        if journal is not None and not resume and not journal.steps_kept:
            journal.remove()
        resumable = "; continue with --resume" if journal is not None and journal.steps_kept else ""
        at = f"step {summary.steps} of {len(batches)}"
        raise Interrupted(f"interrupted after {at}; no plan was written{resumable}") from None
    if journal is not None:
        journal.remove()
    loading = loading_seconds()
    return PlanResult(
        metadata=writer.metadata,
        summary=summary,
        planning_seconds=time.perf_counter() - started - loading,
        loading_seconds=loading,
        solver=solver,
    )


def _journalled_steps(
    batches: GlobalBatches,
    solver: Solver,
    workers: int,
    journal: PlanJournal | None,
    resume: bool,
) -> Iterator[StepPlan]:
    """Yield the steps of a plan in order: those of the journal, then newly planned ones."""
    kept = 0
    if journal is not None and resume:
        for step in kept_steps(batches, journal):
            kept += 1
            yield step
    elif journal is not None:
        journal.start()
    missing = (batches.batch(step) for step in range(kept, len(batches)))
    with closing(plan_steps(missing, batches.problem, solver, workers=workers)) as steps:
        for step in steps:
            if journal is not None:
                journal.append(step)
            yield step


def kept_steps(batches: GlobalBatches, journal: PlanJournal) -> Iterator[StepPlan]:
    """Yield the steps of a journal, each validated against its batch, since digests do not detect forgery.

    Raises:
        FcpError: as in `PlanJournal.resume`, or a step is not a valid plan of its batch.
    """
    profile, table = batches.problem.profile, batches.table
    for number, step in enumerate(journal.resume()):
        batch = batches.batch(number)
        order, due = np.argsort(step.sequences), np.argsort(batch.rows)
        same = np.array_equal(step.sequences[order], batch.rows[due])
        if not same or not np.array_equal(step.lengths[order], batch.lengths[due]):
            raise journal.damaged(f"step {step.step} does not hold the sequences of its batch")
        finding = next(check_step(step, journal.metadata, profile, table), None)
        if finding is not None:
            raise journal.damaged(str(finding))
        yield step


def plan_metadata(table: LengthTable, batches: GlobalBatches, solver: Solver) -> PlanMetadata:
    """Return the plan's metadata without totals and hash."""
    problem, settings = batches.problem, batches.settings
    return PlanMetadata(
        **problem.metadata_fields(),
        fcp_version=__version__,
        global_batch_size=settings.global_batch_size,
        masked_sequences=None if table.eta is None else int(np.count_nonzero(table.eta)),
        masks=None if table.eta is None else planned_masks(table.masks),
        seed=settings.seed,
        shuffle=settings.shuffle,
        epochs=settings.epochs,
        last_batch=settings.last_batch,
        step_limit=settings.step_limit,
        batching=settings.batching,
        overlong=batches.overlong,
        solver=solver.name,
        solver_options=solver.options,
        manifest=ManifestReference(name=table.name, rows=len(table), content_hash=table.content_hash()),
        shuffle_kind=batches.shuffle_kind,
        mixture=settings.mixture,
        continues=batches.continues,
    )


def default_workers(steps: int, global_batch_size: int = 1) -> int:
    """Return the default number of planning processes: the usable cores, fewer if the work does not pay their start."""
    return max(1, min(usable_cores(), steps, max(steps // 1000, steps * global_batch_size // _SEQUENCES_PER_WORKER)))


def plan_steps(
    batches: Iterator[Batch], problem: Problem, solver: Solver, *, workers: int
) -> Generator[StepPlan, None, None]:
    """Yield the planned batches in order; closing the generator early stops its worker processes.

    Raises:
        FcpError: a worker process was killed.
    """
    if workers == 1:
        for batch in batches:
            yield plan_step(batch, problem, solver)
        return
    tasks = _tasks(batches)
    planned = in_order(
        _plan_task,
        tasks,
        workers=workers,
        initializer=_start_worker,
        arguments=(problem, solver),
        noun="planning process",
    )
    with closing(planned):
        for steps in planned:
            yield from steps


def _tasks(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Yield lists of batches large enough to amortize sending, small enough to spread over the cores."""
    for batch in batches:
        few = max(1, min(_STEPS_PER_TASK, _SEQUENCES_PER_TASK // len(batch.rows)))
        yield [batch, *islice(batches, few - 1)]


def plan_step(batch: Batch, problem: Problem, solver: Solver) -> StepPlan:
    """Plan one step: a pure function of its arguments."""
    return assemble(solver.assign(batch), batch, problem)


def _start_worker(problem: Problem, solver: Solver) -> None:
    global _problem, _solver
    _problem, _solver = problem, solver


def _plan_task(batches: list[Batch]) -> list[StepPlan]:
    assert _problem is not None and _solver is not None
    return [plan_step(batch, _problem, _solver) for batch in batches]
