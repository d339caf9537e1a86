"""The rank that failed and its error, from the log folder of torchrun and the ranks."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fcp_cli.errors import RunError
from fcp_cli.util import processes
from fcp_cli.util.inputs import read_json

_LAST_LINES = 20
_STOPPED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failed rank or launcher, and its error.

    Attributes:
        rank: global rank, or None if the launcher itself failed.
        status: exit status; negative: the signal that killed it.
        message: one-line error of fcp, or the reason of a failed rendezvous; else "".
        last_lines: last lines of its standard error.
        log: file with all of its standard error.
        is_local_rank_0: whether the log is local rank 0's, which node 0 copies to the terminal.
        launcher: name of the launcher.
        raised: last line of its traceback, or "".
        is_victim: whether only a lost connection to another rank is known.
    """

    rank: int | None
    status: int
    message: str
    last_lines: tuple[str, ...]
    log: Path
    is_local_rank_0: bool = False
    launcher: str = "torchrun"
    raised: str = ""
    is_victim: bool = False

    def summary(self) -> str:
        """Return one line: the failed rank, the cause, and the log file."""
        if self.rank is None:
            early = f"{self.launcher} failed with status {self.status} before any rank did; see {self.log}"
            if self.status < 0:
                early = f"{self.launcher} on {socket.gethostname()} {processes.ending(self.status)}"
                early += f", and its ranks with it; see {self.log}"
            return self.message or early
        if self.message:
            return self.message if self.message.startswith("rank ") else f"{self.who}: {self.message}"
        if self.is_victim:
            where = "lost its connection to a rank of another node, which names the reason unless that node died"
            return f"{self.who} {where}; its whole output is in {self.log}"
        how = f"failed: {self.raised}" if self.raised else f"exited with status {self.status}"
        # A rank may abort at interpreter exit after an exception, which is then the reason.
        if self.status < 0 and not (self.status == -signal.SIGABRT and self.raised):
            how = processes.ending(self.status)
        return f"{self.who} {how}; its whole output is in {self.log}"

    def report(self, *, rank_0_is_shown: bool) -> tuple[tuple[str, ...], str]:
        """Return the rank's last lines and the summary, both empty if already on the screen.

        Args:
            rank_0_is_shown: whether local rank 0's output was copied to the screen.
        """
        is_shown = rank_0_is_shown and self.is_local_rank_0
        if self.message and is_shown:
            return (), ""
        if self.message or is_shown or not self.last_lines:
            return (), self.summary()
        return (f"last lines of {self.who}:", *(f"  {line}" for line in self.last_lines)), self.summary()

    @property
    def who(self) -> str:
        """The rank and this host, or the launcher."""
        if self.rank is None:
            return self.launcher
        return f"rank {self.rank} on {socket.gethostname()}"


class TorchrunRanks:
    """Output files and failures of the ranks that torchrun started on this node; same interface as `MsrunRanks`.

    Attributes:
        log: output of torchrun itself.
        streams: output streams of a rank, each with its own file.
    """

    streams: tuple[str, ...] = ("stdout", "stderr")

    def __init__(self, log_dir: Path) -> None:
        self.log = log_dir / "torchrun.log"
        self._log_dir = log_dir

    def rank_0(self, stream: str) -> Path | None:
        """Return the output file of local rank 0 for a stream; None until the rank has started."""
        found = sorted(self._log_dir.glob(f"*/attempt_*/0/{stream}.log"))
        # The latest of several attempts.
        return found[-1] if found else None

    def must_end(self, pid: int) -> bool:
        """Return whether the launcher must be killed because a rank failed; never, since torchrun exits by itself."""
        return False

    def ranks(self, pid: int) -> list[int]:
        """Return the pids of the running ranks."""
        return processes.children(pid)

    def find_failure(self, status: int) -> Failure:
        """Return the root cause after torchrun exited with `status`; see `blame`."""
        summary = _text(self.log)
        logs = {int(path.parent.name): path for path in sorted(self._log_dir.glob("*/attempt_*/*/stderr.log"))}
        words = {local_rank: _recorded_error(path.parent) or last_lines(path) for local_rank, path in logs.items()}
        failed = failed_ranks(summary, words)
        if not failed:
            stopped = _STOPPED.search(summary)  # by someone else: fcp only signals ranks, or kills
            return Failure(
                rank=None,
                status=-int(stopped[1]) if stopped else status,
                message=meeting_problem(summary),
                last_lines=() if stopped else last_lines(self.log),
                log=self.log,
            )
        first = failed[0]
        log = logs.get(first.local_rank, self.log)
        return failure_of(first, log=log, is_local_rank_0=first.local_rank == 0)


def _recorded_error(folder: Path) -> tuple[str, ...]:
    """Return the error that a rank recorded for TorchElastic, as last lines of standard error; () without a record.

    The runtime, the bundled trainer and scripts under `@record` write one; scripts without hooks (--inject none) and
    ranks killed by a signal do not.
    """
    try:
        message = read_json(folder / "error.json", error=RunError)["message"]
        line, stack = str(message["message"]), str(message["extraInfo"]["py_callstack"])
    except (RunError, KeyError, TypeError):
        return ()
    # Errors of fcp are recorded without a traceback.
    lines = [f"error: {line}"] if stack == line else stack.splitlines()
    return tuple(filter(str.strip, lines))[-_LAST_LINES:]


def failure_of(first: FailedRank, *, log: Path, is_local_rank_0: bool = False, launcher: str = "torchrun") -> Failure:
    """Return the failure of the root-cause rank, which ran on this machine."""
    return Failure(
        rank=first.rank,
        status=first.status,
        message="" if first.is_victim else first.own_error,
        last_lines=() if first.is_victim else first.words,
        log=log,
        is_local_rank_0=is_local_rank_0,
        launcher=launcher,
        raised=first.raised,
        is_victim=first.is_victim,
    )


def last_lines(path: Path, *, ignored: re.Pattern[str] | None = None) -> tuple[str, ...]:
    """Return the last lines of a log, skipping blank lines and those that match `ignored`."""
    lines = (line for line in _text(path).splitlines() if line.strip())
    return tuple(line for line in lines if ignored is None or not ignored.match(line))[-_LAST_LINES:]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Finds the root cause among several failed ranks, or of a failed rendezvous. Pure functions of log texts.
#
# When one rank fails, its peers lose their connection and fail within milliseconds, and torchrun may see them first.
# So a rank's own error message takes precedence over torchrun's order.

# One failed rank in torchrun's summary; the exit code of a rank killed by a signal is negative.
_FAILED_RANK = re.compile(
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s*exitcode\s*:\s*(?P<status>-?\d+)"
)
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # added by torch to each line of an uncaught exception
# Printed by gloo, NCCL, HCCL and torch's store in a rank whose peer is gone, and by fcp in a rank that stops because
# another rank has printed the reason.
_VICTIM = re.compile(
    r"lost the connection to another rank|Connection (closed|reset) by peer|Broken pipe|Connection refused"
    r"|ncclRemoteError|NCCL (communicator was aborted|error.*remote process exited)|HCCL.*(remote|timeout)"
    r"|Socket Timeout|DistNetworkError|DistStoreError|the line that it printed says why"
)
# Printed by fcp in a rank whose peer sent nothing; a failed peer's own error is a better reason.
_WAITED = re.compile(r"(rank \d+ on \S+: )?waited \S+ s in vain for another rank")
# An error of fcp, printed by its programs or raised through a user's script.
_OWN_ERROR = re.compile(r"^(?:error: |fcp_cli\.errors\.\w+: )(?P<message>.+)$")
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*$")
# Printed by C++ if a backend's threads still run at interpreter exit: an abort after the rank's own error.
_TEARDOWN = "terminate called without an active exception"
_ABORT = -6  # SIGABRT, from NCCL's watchdog or a C++ exception: mostly in a rank whose peer is gone
_TERMINATED = -15  # SIGTERM, from torchrun to the remaining ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRank:
    """A failed rank.

    Attributes:
        status: exit status; negative: the signal that killed it.
        words: last lines of its standard error.
    """

    rank: int
    local_rank: int
    status: int
    words: tuple[str, ...] = ()

    @property
    def own_error(self) -> str:
        """Message of the fcp error in its last line, else ""."""
        match = _OWN_ERROR.match(self.words[-1]) if self.words else None
        return match["message"] if match else ""

    @property
    def raised(self) -> str:
        """Last exception of its output with the first line of its message, else ""."""
        for at in reversed(range(len(self.words))):
            if _RAISED.match(self.words[at]):
                said = self.words[at].strip()
                if said.endswith(":"):  # transformers begins messages with a line break, and wraps sentences
                    said += " " + next(filter(None, map(str.strip, self.words[at + 1 :])), "").partition(". ")[0]
                return said
        return ""

    @property
    def is_victim(self) -> bool:
        """Whether it failed because another rank did."""
        # An fcp error decides alone: torch's output before it may look like a victim's.
        lines = self.words[-1:] if self.own_error else self.words
        return any(_VICTIM.search(line) for line in lines)

    @property
    def blame(self) -> int:
        """Sort key of the root cause, 0 to 4; the lower, the likelier it failed first."""
        if self.own_error and not self.is_victim:
            return 3 if _WAITED.match(self.own_error) else 0
        # Killed or crashed by itself, without time to print a reason.
        if self.status < 0 and self.status not in (_ABORT, _TERMINATED):
            return 1
        if not self.is_victim:
            return 2 if self.status > 0 or self.raised else 3
        return 4


def failed_ranks(summary: str, words: Mapping[int, Sequence[str]]) -> list[FailedRank]:
    """Return the failed ranks of this node, the root cause first; none if torchrun itself failed.

    Args:
        summary: log of torchrun, whose summary lists the first failure last.
        words: last lines of standard error by local rank.
    """
    found = [
        FailedRank(
            rank=int(match["rank"]),
            local_rank=int(match["local_rank"]),
            status=int(match["status"]),
            words=without_noise(words.get(int(match["local_rank"]), ())),
        )
        for match in reversed(list(_FAILED_RANK.finditer(summary)))
    ]
    return by_blame(found, words)


def by_blame(found: Sequence[FailedRank], words: Mapping[int, Sequence[str]]) -> list[FailedRank]:
    """Return the failed ranks of this node, the root cause first.

    Includes ranks that the launcher did not see fail, but whose output ends with an error.

    Args:
        found: ranks that the launcher saw fail, in order of time.
        words: last lines of standard error by local rank.
    """
    # Ranks that fail together print the same fcp error: prefer local rank 0, whose output is shown anyway.
    return sorted(
        [*found, *_unseen(found, words)],
        key=lambda rank: (rank.blame, rank.local_rank if rank.own_error else 0),
    )


def _unseen(found: Sequence[FailedRank], words: Mapping[int, Sequence[str]]) -> Iterator[FailedRank]:
    """Yield ranks that printed an error but had not exited yet when the launcher saw one of their victims fail."""
    if not found:
        return
    seen = {rank.local_rank for rank in found}
    for local_rank in sorted(words.keys() - seen):
        rank = FailedRank(
            rank=local_rank + found[0].rank - found[0].local_rank,
            local_rank=local_rank,
            status=1,
            words=without_noise(words[local_rank]),
        )
        # A rank without an error may have succeeded, and a victim is not the cause.
        if (rank.own_error or rank.raised) and not rank.is_victim:
            yield rank


def without_noise(lines: Sequence[str]) -> tuple[str, ...]:
    """Return a rank's output without torch's `[rankN]:` prefixes and the teardown line of C++."""
    return tuple(_PREFIX.sub("", line) for line in lines if line != _TEARDOWN)


_CAUSES = (
    (re.compile(r"Rendezvous\w*Error: (?P<why>.+)"), "{why}"),  # of `launching.rendezvous`, with its remedy
    (
        re.compile(r"DistNetworkError: Failed to recv"),
        "the store at --master-addr and --master-port ended while this node waited for the others: node 0 failed, or "
        "it was another job's; give node 0's address and a free port",
    ),
    (
        re.compile(r"DistNetworkError: Ping failed"),
        "the process at --master-addr and --master-port is not node 0 of this job; give node 0's address and a free "
        "port",
    ),
)


def meeting_problem(log: str) -> str:
    """Return the reason of a failed rendezvous from torchrun's log; "" if it failed otherwise."""
    for pattern, text in _CAUSES:
        match = pattern.search(log)
        if match is not None:
            return text.format(**match.groupdict())
    return ""


# Ranks that msrun started on this node: numbers, output files and failures.
#
# msrun writes both streams of a rank to `worker_RANK.log`. If a rank fails, msrun kills the others and then waits for
# its scheduler for minutes, and it reports the lowest failed rank, not the first in time. So ranks are monitored from
# outside.

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
