"""Yields results of worker processes in task order, with few tasks in flight, so that memory stays constant."""

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
    """Yield `work(task)` for each task, in order; closing the iterator early stops all processes.

    Args:
        work: an importable function; its exceptions are raised here.
        tasks: tasks; consumed only slightly ahead of results.
        workers: number of processes.
        initializer: called once per process with `arguments`.
        arguments: arguments of `initializer`.
        noun: name of a worker for messages, for example "planning process".
    """
    # Spawned, not forked: forking a process with threads (Arrow's) may hang.
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
            with _starting():  # submitting may start a process
                pending.append(pool.submit(work, task))
            if len(pending) >= ahead:
                break
        if not pending:
            return
        yield pending.popleft().result()


@contextmanager
def _starting() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which signals the whole process group, and are never partially started.

    A new process inherits the blocked signal, so that not even its start-up can end with a traceback.
    """
    with interrupts_deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
