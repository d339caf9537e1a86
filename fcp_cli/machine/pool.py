"""Results of worker processes in the order of their tasks, with few tasks under way at a time: memory stays flat."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from fcp_cli.errors import FcpError
from fcp_cli.machine.interrupts import interrupts_deferred

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_AHEAD: Final = 3  # per worker


def in_order(
    work: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    workers: int,
    initializer: Callable[..., None],
    arguments: tuple[Any, ...],
    noun: str,
) -> Generator[Result, None, None]:
    """Yield `work(task)` of each task, in their order; closing the iterator early leaves no process behind.

    Args:
        work: a function of a module, which workers import; its exceptions are raised here.
        tasks: the tasks to be done; few are taken ahead of their results.
        workers: number of processes.
        initializer: called with `arguments` once in every process.
        arguments: the arguments that travel to each process.
        noun: the name of a worker, for messages: "planning process".
    """
    # Spawned, not forked: a fork of a process that has threads (Arrow's) may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=initializer, initargs=arguments)
    try:
        yield from _results(pool, work, iter(tasks), workers * _TASKS_AHEAD)
    except BrokenProcessPool as error:
        raise FcpError(f"a {noun} was killed, perhaps for lack of memory; try --workers 1") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _results(
    pool: ProcessPoolExecutor, work: Callable[[Task], Result], tasks: Iterator[Task], ahead: int
) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    while True:
        for task in tasks:
            with _starting():  # of processes, while there are fewer than asked for
                pending.append(pool.submit(work, task))
            if len(pending) >= ahead:
                break
        if not pending:
            return
        yield pending.popleft().result()


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
