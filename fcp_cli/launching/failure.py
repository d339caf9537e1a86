"""Which rank failed, and its last words, out of what torchrun and the ranks left in the log folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# torchrun's summary of the failure that it saw first; a rank that a signal ended has a negative exit code.
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s*exitcode\s*:\s*(?P<status>-?\d+)",
    re.DOTALL,
)
_OWN_ERROR = "error: "
_LAST_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Who failed, and how.

    Attributes:
        rank: global rank, or None where torchrun itself failed.
        status: exit status of the rank; negative: the signal that ended it.
        message: the one line that fcp's own code ended with, else "".
        last_lines: the end of its standard error.
        log: the whole of it.
    """

    rank: int | None
    status: int
    message: str
    last_lines: tuple[str, ...]
    log: Path

    @property
    def is_local_rank_0(self) -> bool:
        """Whether the log is the one that is copied to the terminal of node 0."""
        return self.log.parent.name == "0"

    def summary(self) -> str:
        """One line: who failed, how, and where the rest can be read."""
        if self.rank is None:
            return f"torchrun failed with status {self.status} before any rank did; see {self.log}"
        if self.message:
            return self.message
        how = f"exited with status {self.status}" if self.status >= 0 else f"was ended by signal {-self.status}"
        hint = " (out of memory?)" if self.status == -9 else ""
        return f"rank {self.rank} {how}{hint}; its whole output is in {self.log}"


def torchrun_log(log_dir: Path) -> Path:
    """What torchrun itself says; the ranks' output is beside it."""
    return log_dir / "torchrun.log"


def rank_log(log_dir: Path, local_rank: int, stream: str) -> Path | None:
    """Where torchrun sends `stdout` or `stderr` of a local rank; None until it has started it."""
    found = sorted(log_dir.glob(f"*/attempt_*/{local_rank}/{stream}.log"))
    return found[-1] if found else None


def find_failure(log_dir: Path, *, status: int) -> Failure:
    """The rank to blame after torchrun ended with `status`.

    A rank whose last line is fcp's own error is believed before the one whose end torchrun noticed first: when one rank
    stops, its peers fail within milliseconds because their connection is gone.
    """
    cause = _ROOT_CAUSE.search(_text(torchrun_log(log_dir)))
    if cause is None:
        log = torchrun_log(log_dir)
        return Failure(rank=None, status=status, message="", last_lines=_last_lines(log), log=log)
    log = rank_log(log_dir, int(cause["local_rank"]), "stderr") or torchrun_log(log_dir)
    log, message = _own_error(log_dir) or (log, "")
    return Failure(
        rank=int(cause["rank"]), status=int(cause["status"]), message=message, last_lines=_last_lines(log), log=log
    )


def _own_error(log_dir: Path) -> tuple[Path, str] | None:
    for log in sorted(log_dir.glob("*/attempt_*/*/stderr.log")):
        lines = _last_lines(log)
        if lines and lines[-1].startswith(_OWN_ERROR):
            return log, lines[-1].removeprefix(_OWN_ERROR)
    return None


def _last_lines(path: Path) -> tuple[str, ...]:
    return tuple(line for line in _text(path).splitlines() if line.strip())[-_LAST_LINES:]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
