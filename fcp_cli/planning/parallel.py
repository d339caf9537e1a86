"""Planned steps from several processes, in order: the same steps whatever their number.

A step is a pure function of its batch, so only batches travel to the workers and planned steps back. Few chunks are
under way at a time, so that memory stays flat however long the plan is.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice

from fcp_cli.errors import FcpError
from fcp_cli.machine.host import usable_cores
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.interrupts import interrupts_deferred
from fcp_cli.planning.problem import Batch, Problem, Solver

_STEPS_PER_TASK = 32
_TASKS_AHEAD = 3  # per worker

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
    # Spawned, not forked: a fork of a process that has threads (Arrow's) may hang.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(problem, solver)
    )
    try:
        yield from _in_order(pool, batches, workers * _TASKS_AHEAD)
    except BrokenProcessPool as error:
        raise FcpError("a planning process was killed, perhaps for lack of memory; try --workers 1") from error
    finally:
        pool.shutdown(cancel_futures=True)


def plan_step(batch: Batch, problem: Problem, solver: Solver) -> StepPlan:
    """Plan one step: a pure function of its arguments."""
    return assemble(solver.assign(batch), batch, problem)


def _in_order(pool: ProcessPoolExecutor, batches: Iterator[Batch], ahead: int) -> Iterator[StepPlan]:
    pending: deque[Future[list[StepPlan]]] = deque()
    while True:
        while len(pending) < ahead and (task := list(islice(batches, _STEPS_PER_TASK))):
            with _starting():  # of processes, while there are fewer than asked for
                pending.append(pool.submit(_plan_task, task))
        if not pending:
            return
        yield from pending.popleft().result()


@contextmanager
def _starting() -> Iterator[None]:
    """Start processes within that never see Ctrl-C, which reaches the whole process group, and are never half started.

    A blocked signal stays blocked in a new process from its first moment, when Python could only end with a traceback.
    """
    with interrupts_deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(problem: Problem, solver: Solver) -> None:
    global _problem, _solver
    _problem, _solver = problem, solver


def _plan_task(batches: list[Batch]) -> list[StepPlan]:
    assert _problem is not None and _solver is not None
    return [plan_step(batch, _problem, _solver) for batch in batches]
