"""The rank that failed and its error, from the log folder of torchrun and the ranks."""

from __future__ import annotations

import re
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.launching.supervision.blame import FailedRank, failed_ranks, meeting_problem
from fcp_cli.machine import processes
from fcp_cli.reading.documents import read_json

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
                early = f"{self.launcher} on {socket.gethostname()} was ended by {_signal_words(self.status)}"
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
            how = f"was ended by {_signal_words(self.status)}"
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


def _signal_words(status: int) -> str:
    return f"signal {-status}{' (out of memory?)' if status == -signal.SIGKILL else ''}"


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
