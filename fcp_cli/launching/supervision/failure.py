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
    """A rank or launcher that failed, and its error.

    Attributes:
        rank: global rank, or None if the launcher itself failed.
        status: exit status of the rank; negative: the signal that ended it.
        message: the one line that fcp's own code ended with, or why the rendezvous failed; else "".
        last_lines: the end of its standard error.
        log: the whole of it.
        is_local_rank_0: whether the log is the one that is copied to the terminal of node 0.
        launcher: the launcher of the rank.
        raised: the exception that ended it, if it left a traceback.
        is_victim: whether all that is known here is that its connection to another rank broke.
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
        """Return one line: the failed rank, the cause, and the file with the rest."""
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
        # A rank that raised may yet abort while its interpreter ends: the exception is the reason then, not the signal.
        if self.status < 0 and not (self.status == -signal.SIGABRT and self.raised):
            how = f"was ended by {_signal_words(self.status)}"
        return f"{self.who} {how}; its whole output is in {self.log}"

    def report(self, *, rank_0_is_shown: bool) -> tuple[tuple[str, ...], str]:
        """Return the rank's last lines and the summary, without lines already on the screen; both may be empty.

        Args:
            rank_0_is_shown: local rank 0's output was copied to the screen.
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
    """The ranks that torchrun has started here: their output files and failures. `MsrunRanks` has the same methods.

    Attributes:
        log: output of the launcher itself.
        streams: names of a rank's output files.
    """

    streams: tuple[str, ...] = ("stdout", "stderr")

    def __init__(self, log_dir: Path) -> None:
        self.log = log_dir / "torchrun.log"
        self._log_dir = log_dir

    def rank_0(self, stream: str) -> Path | None:
        """Return the file of a stream of local rank 0; None until it has been started."""
        found = sorted(self._log_dir.glob(f"*/attempt_*/0/{stream}.log"))
        # Of several attempts the latest.
        return found[-1] if found else None

    def must_end(self, pid: int) -> bool:
        """Return whether the launcher must be ended because a rank failed: torchrun ends by itself."""
        return False

    def ranks(self, pid: int) -> list[int]:
        """Return the processes that run."""
        return processes.children(pid)

    def find_failure(self, status: int) -> Failure:
        """Return the rank to blame after torchrun ended with `status`; see `blame`."""
        summary = _text(self.log)
        logs = {int(path.parent.name): path for path in sorted(self._log_dir.glob("*/attempt_*/*/stderr.log"))}
        words = {local_rank: _recorded_error(path.parent) or last_lines(path) for local_rank, path in logs.items()}
        failed = failed_ranks(summary, words)
        if not failed:
            stopped = _STOPPED.search(summary)  # by someone else: fcp signals the ranks, or kills
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
    """Return a rank's record for TorchElastic, as its standard error would end with it; empty without a record.

    The runtime, the bundled trainer and any script under `@record` leave one; a script without hooks (--inject none)
    does not, nor does a rank that a signal ended: of those the printed lines are all there is.
    """
    try:
        message = read_json(folder / "error.json", error=RunError)["message"]
        line, stack = str(message["message"]), str(message["extraInfo"]["py_callstack"])
    except (RunError, KeyError, TypeError):
        return ()
    # fcp's own errors are one line without a traceback.
    lines = [f"error: {line}"] if stack == line else stack.splitlines()
    return tuple(filter(str.strip, lines))[-_LAST_LINES:]


def failure_of(first: FailedRank, *, log: Path, is_local_rank_0: bool = False, launcher: str = "torchrun") -> Failure:
    """Return the failure of the rank that is to blame, on this machine."""
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
    """Return the last lines of a log that are not blank, nor match `ignored`."""
    lines = (line for line in _text(path).splitlines() if line.strip())
    return tuple(line for line in lines if ignored is None or not ignored.match(line))[-_LAST_LINES:]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
