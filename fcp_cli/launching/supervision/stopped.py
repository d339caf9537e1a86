"""Detects ranks suspended by SIGSTOP: they stay alive, and all other ranks wait for them until a time-out."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from fcp_cli.launching.supervision.failure import Failure
from fcp_cli.machine import processes

_LOOK_SECONDS: Final = 2.0  # each poll scans /proc
_SUSPENDED_SECONDS: Final = 10.0  # a longer gap between polls: fcp itself was suspended, so times are void
_MOST_SECONDS: Final = 30.0  # time for SIGCONT before the job is killed
_RANK: Final = ("RANK", "MS_NODE_ID")


class StoppedRanks:
    """Suspended ranks of one node.

    The job is killed after a rank has been suspended for half a minute, unless all ranks of the node are.

    Args:
        announce: receives one line per suspended rank.
        clock: time in seconds.

    Attributes:
        overdue: rank (None: the launcher) for which the job was killed, its pid, and its suspended time in seconds.
    """

    def __init__(self, announce: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.overdue: tuple[int | None, int, float] | None = None
        self._announce = announce
        self._clock = clock
        self._looked = clock()
        self._since: dict[int, float] = {}
        self._most = 0

    @property
    def are_seen(self) -> bool:
        """Whether a rank or the launcher was suspended at the last poll."""
        return bool(self._since)

    def must_end(self, launcher: int, ranks: Callable[[int], Sequence[int]]) -> bool:
        """Poll for suspended ranks; return True if the job must be killed. Call it repeatedly.

        Args:
            launcher: pid of the launcher.
            ranks: returns the pids of its ranks.
        """
        now = self._clock()
        if now - self._looked < _LOOK_SECONDS:
            return False
        if now - self._looked > _SUSPENDED_SECONDS:
            self._since.clear()
        self._looked = now
        running = ranks(launcher)
        stopped = [pid for pid in (launcher, *running) if processes.is_stopped(pid)]
        for pid in stopped:
            if pid not in self._since:
                self._announce(f"{_name(pid, launcher)} is stopped (SIGSTOP); let it continue with: kill -CONT {pid}")
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        self._most = max(self._most, len(running))  # ranks that failed by time-out meanwhile are gone
        # If all ranks are suspended, so is the node, and no rank waits for another.
        if not stopped or sum(pid != launcher for pid in stopped) == self._most:
            return False
        first = min(stopped, key=self._since.__getitem__)
        if now - self._since[first] < _MOST_SECONDS:
            return False
        self.overdue = (None if first == launcher else _rank(first), first, now - self._since[first])
        return True

    def failure(self, log: Path) -> Failure | None:
        """Return the failure of a job that was killed because of a suspended rank, or None."""
        if self.overdue is None:
            return None
        rank, pid, seconds = self.overdue
        launcher = log.stem  # torchrun.log, msrun.log
        who = launcher if rank is None else f"rank {rank}"
        message = (
            f"{who} on {socket.gethostname()} (process {pid}) was stopped by SIGSTOP for {seconds:.0f} s while the "
            f"other ranks waited for it, so the job was ended; all output is in {log.parent}"
        )
        return Failure(rank=rank, status=-signal.SIGSTOP, message=message, last_lines=(), log=log, launcher=launcher)


def _rank(pid: int) -> int | None:
    environment = processes.environment_of(pid)
    found = next((environment[name] for name in _RANK if environment.get(name, "").isdecimal()), None)
    return None if found is None else int(found)


def _name(pid: int, launcher: int) -> str:
    return "the launcher" if pid == launcher else f"rank {_rank(pid)}"
