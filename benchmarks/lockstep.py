"""The members of a ring in one thread, as generators that take turns: for tests and benchmarks of rings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from fcp_cli.runtime.transport import Handle, Waits
from fcp_cli.verification.emulation import Delivery, Mailbox, ThreadTransport

Result = TypeVar("Result")


class LockstepTransport(ThreadTransport):
    """One rank of several that run in one thread, as generators driven by `run_lockstep`."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        super().__init__(mailbox, rank, timeout_seconds=0.0)


def run_lockstep(members: Sequence[Waits[Result]]) -> list[Result]:
    """Drive the generators of all members of a ring in one thread; return their results, in order.

    Each generator yields the handle it waits for. Raises: RunError when no member can continue.
    """
    results: dict[int, Result] = {}
    waiting: deque[tuple[int, Handle | None]] = deque((i, None) for i in range(len(members)))
    stalled = 0
    while waiting:
        index, handle = waiting.popleft()
        if handle is not None:
            # When a whole round has moved no member, none ever will: the wait then raises.
            if isinstance(handle, Delivery) and not handle.ready() and stalled <= len(waiting):
                stalled += 1
                waiting.append((index, handle))
                continue
            handle.wait()
        stalled = 0
        try:
            waiting.append((index, next(members[index])))
        except StopIteration as stop:
            results[index] = stop.value
    return [results[i] for i in range(len(members))]
