"""Process pool that yields results in task order with a bounded number of tasks in flight."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, TypeVar

from fcp_cli.errors import FcpError
from fcp_cli.util.machine import usable_cores
from fcp_cli.util.processes import interrupts_deferred

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
    """Yield `work(task)` for each task, in order; closing the generator early stops all processes.

    Args:
        work: importable function; its exceptions are raised here.
        tasks: tasks, consumed only slightly ahead of results.
        workers: number of processes.
        initializer: called once per process with `arguments`.
        arguments: arguments of `initializer`.
        noun: name of a worker for messages, for example "planning process".

    Raises:
        FcpError: a worker process was killed.
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


@contextmanager
def beside(work: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Context manager: run `work(*arguments)` in another process meanwhile, if there is a core for it.

    The block must not depend on it: the process ends with the block, and its failure is not reported.
    """
    if usable_cores() == 1:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")  # a script would run again there
    try:
        with without_interrupts():
            process.start()
    finally:
        sys.modules["__main__"] = main
    try:
        yield
    finally:
        process.terminate()


def _results(
    pool: ProcessPoolExecutor, work: Callable[[Task], Result], tasks: Iterator[Task], ahead: int
) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    while True:
        for task in tasks:
            with without_interrupts():  # submitting may start a process
                pending.append(pool.submit(work, task))
            if len(pending) >= ahead:
                break
        if not pending:
            return
        yield pending.popleft().result()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Context manager: block Ctrl-C, which signals the whole process group, while child processes start.

    A new process inherits the blocked signal, so Ctrl-C never reaches a worker, not even during its start-up.
    """
    with interrupts_deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
