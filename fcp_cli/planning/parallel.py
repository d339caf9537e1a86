"""Planned steps from several processes, in order: the same steps whatever their number.

A step is a pure function of its batch, so only batches travel to the workers and planned steps back.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice

from fcp_cli.machine.host import usable_cores
from fcp_cli.machine.pool import in_order
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.problem import Batch, Problem, Solver

_STEPS_PER_TASK = 32

# Set once in every worker process.
_solver: Solver | None = None
_problem: Problem | None = None


def default_workers(steps: int) -> int:
    """One process per usable core, but none that would have less to do than it takes to start it."""
    return max(1, min(usable_cores(), steps // 1000))


def plan_steps(
    batches: Iterator[Batch], problem: Problem, solver: Solver, *, workers: int
) -> Generator[StepPlan, None, None]:
    """Plan the batches, in order; closing the iterator early leaves no process behind.

    Raises:
        FcpError: a worker process was killed.
    """
    if workers == 1:
        for batch in batches:
            yield plan_step(batch, problem, solver)
        return
    tasks = iter(lambda: list(islice(batches, _STEPS_PER_TASK)), [])
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


def plan_step(batch: Batch, problem: Problem, solver: Solver) -> StepPlan:
    """Plan one step: a pure function of its arguments."""
    return assemble(solver.assign(batch), batch, problem)


def _start_worker(problem: Problem, solver: Solver) -> None:
    global _problem, _solver
    _problem, _solver = problem, solver


def _plan_task(batches: list[Batch]) -> list[StepPlan]:
    assert _problem is not None and _solver is not None
    return [plan_step(batch, _problem, _solver) for batch in batches]
