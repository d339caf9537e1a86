"""Ranks that msrun started on this node: numbers, output files and failures.

msrun writes both streams of a rank to `worker_RANK.log`. If a rank fails, msrun kills the others and then waits for
its scheduler for minutes, and it reports the lowest failed rank, not the first in time. So ranks are monitored from
outside.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from fcp_cli.launching.supervision.blame import FailedRank, by_blame, without_noise
from fcp_cli.launching.supervision.failure import Failure, TorchrunRanks, failure_of, last_lines
from fcp_cli.machine import processes

_LOCAL_WORKERS = "--local_worker_num="
_ROLE, _WORKER, _SCHEDULER, _RANK = "MS_ROLE", "MS_WORKER", "MS_SCHED", "MS_NODE_ID"
# Time for the other ranks to print their errors after the first failure.
_GRACE_SECONDS = 3.0
_NOTICE = re.compile(r"Worker process (?P<process>\d+) exit with exception\. Error code: (?P<status>-?\d+)")
# MindSpore's own log lines, which may follow a rank's error.
_CHATTER = re.compile(r"^\[(DEBUG|INFO|WARNING)\] ")


class MsrunRanks:
    """Ranks of one node. Poll `must_end` while msrun runs: ranks are found only while they live."""

    streams: tuple[str, ...] = ("stdout",)

    def __init__(self, argv: Sequence[str], log_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.log = log_dir / "msrun.log"
        self._log_dir = log_dir
        self._expected = next(
            int(word.removeprefix(_LOCAL_WORKERS)) for word in argv if word.startswith(_LOCAL_WORKERS)
        )
        self._clock = clock
        self._ranks: dict[int, int] = {}  # pid -> global rank
        self._scheduler: int | None = None
        self._failed: tuple[int | None, int] | None = None  # rank (None: the scheduler) and status
        self._ends_at = 0.0

    def rank_0(self, stream: str) -> Path | None:
        """Return the output file of global rank 0; None until it has started, and on other nodes."""
        path = self._worker_log(0)
        return path if path.is_file() else None

    def must_end(self, pid: int) -> bool:
        """Poll for failed ranks; return True if msrun must be killed, `_GRACE_SECONDS` after the first failure."""
        self._find(pid)
        if self._failed is None:
            self._failed = self._first_failed()
            self._ends_at = self._clock() + _GRACE_SECONDS
        return self._failed is not None and self._clock() > self._ends_at

    def ranks(self, pid: int) -> list[int]:
        """Return the pids of the running ranks."""
        self._find(pid)
        alive = set(processes.children(pid))
        return [process for process in self._ranks if process in alive]

    def find_failure(self, status: int) -> Failure:
        """Return the root cause after msrun exited with `status`; see `blame`.

        Last lines are reported even of rank 0, since on the screen they are buried in MindSpore's log lines.
        """
        rank, status = self._failed or self._noticed() or (None, status)
        if rank is None:
            # A failed process without a rank is the scheduler.
            scheduler = self._log_dir / "scheduler.log"
            log = scheduler if self._failed is not None and scheduler.is_file() else self.log
            return Failure(
                rank=None,
                status=status,
                message="",
                last_lines=last_lines(log, ignored=_CHATTER),
                log=log,
                launcher="msrun",
            )
        numbers = sorted(self._ranks.values())
        words = {local: last_lines(self._worker_log(each), ignored=_CHATTER) for local, each in enumerate(numbers)}
        local_rank = numbers.index(rank)
        seen = FailedRank(rank=rank, local_rank=local_rank, status=status, words=without_noise(words[local_rank]))
        first = by_blame([seen], words)[0]
        return failure_of(first, log=self._worker_log(first.rank), launcher="msrun")

    def _find(self, pid: int) -> None:
        """Find ranks started since the last call: msrun starts them one by one."""
        if len(self._ranks) == self._expected:
            return
        for child in processes.children(pid):
            environment = processes.environment_of(child)
            # msrun's `tail` has a rank's environment too, but does not lead a session.
            if environment.get(_ROLE) == _WORKER and _RANK in environment and processes.leads_session(child):
                self._ranks[child] = int(environment[_RANK])
            elif environment.get(_ROLE) == _SCHEDULER:
                self._scheduler = child

    def _first_failed(self) -> tuple[int | None, int] | None:
        """Return the first failure: as in msrun's log, written before it kills the others, else by exit status."""
        for process, rank in self._ranks.items():
            if status := processes.exit_status(process):
                return self._noticed() or (rank, status)
        if self._scheduler is not None and (status := processes.exit_status(self._scheduler)):
            return None, status
        return None

    def _noticed(self) -> tuple[int, int] | None:
        found = _NOTICE.search(self.log.read_text(encoding="utf-8", errors="replace"))
        rank = self._ranks.get(int(found["process"])) if found is not None else None
        return None if found is None or rank is None else (rank, int(found["status"]))

    def _worker_log(self, rank: int) -> Path:
        return self._log_dir / f"worker_{rank}.log"


NodeRanks: TypeAlias = TorchrunRanks | MsrunRanks


def ranks_of(argv: Sequence[str], log_dir: Path) -> NodeRanks:
    """Return the ranks object for a launcher's command; `log_dir` holds their output."""
    return MsrunRanks(argv, log_dir) if Path(argv[0]).name == "msrun" else TorchrunRanks(log_dir)
