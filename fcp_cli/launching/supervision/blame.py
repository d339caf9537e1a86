"""Which of several failed ranks is to blame, and why torchrun failed before any rank ran. Pure: texts in, verdict out.

When one rank fails, its peers fail within milliseconds because their connection is gone, and torchrun may see them
first. So a rank's own words count before torchrun's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# One failed rank in torchrun's summary; a rank that a signal ended has a negative exit code.
_FAILED_RANK = re.compile(
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s*exitcode\s*:\s*(?P<status>-?\d+)"
)
_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch's, before each line of an exception that was not caught
# Printed by gloo, NCCL, HCCL and torch's store in a rank whose peer is gone, and by fcp in a rank that agrees with one
# that has already named the reason.
_VICTIM = re.compile(
    r"lost the connection to another rank|Connection (closed|reset) by peer|Broken pipe|Connection refused"
    r"|ncclRemoteError|NCCL (communicator was aborted|error.*remote process exited)|HCCL.*(remote|timeout)"
    r"|Socket Timeout|DistNetworkError|DistStoreError|the line that it printed says why"
)
# Printed by fcp in a rank whose peer sent nothing; a peer that failed has a better reason.
_WAITED = re.compile(r"(rank \d+ on \S+: )?waited \S+ s in vain for another rank")
# fcp's own error, printed by its programs or raised through a user's script.
_OWN_ERROR = re.compile(r"^(?:error: |fcp_cli\.errors\.\w+: )(?P<message>.+)$")
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*$")
# Printed by C++ when a backend's threads still run while the interpreter ends: an abort after the rank's own error.
_TEARDOWN = "terminate called without an active exception"
_ABORT = -6  # how NCCL's watchdog and C++ exceptions end a rank, mostly one whose peer is gone
_TERMINATED = -15  # torchrun ends the ranks that are left


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRank:
    """A rank that its launcher saw fail.

    Attributes:
        status: exit status; negative: the signal that ended it.
        words: the last lines of its standard error.
    """

    rank: int
    local_rank: int
    status: int
    words: tuple[str, ...] = ()

    @property
    def own_error(self) -> str:
        """The error of fcp's own that it ended with, else ""."""
        match = _OWN_ERROR.match(self.words[-1]) if self.words else None
        return match["message"] if match else ""

    @property
    def raised(self) -> str:
        """The exception that its traceback ends with, else ""."""
        return next((line.strip() for line in reversed(self.words) if _RAISED.match(line)), "")

    @property
    def is_victim(self) -> bool:
        """Return whether it failed because another rank had."""
        # If fcp names the error, torch's output before it does not matter.
        lines = self.words[-1:] if self.own_error else self.words
        return any(_VICTIM.search(line) for line in lines)

    @property
    def blame(self) -> int:
        """The lower, the likelier it failed first."""
        if self.own_error and not self.is_victim:
            return 3 if _WAITED.match(self.own_error) else 0
        # A kill or a crash hits one rank by itself; it had no time to say so.
        if self.status < 0 and self.status not in (_ABORT, _TERMINATED):
            return 1
        if not self.is_victim:
            return 2 if self.status > 0 or self.raised else 3
        return 4


def failed_ranks(summary: str, words: Mapping[int, Sequence[str]]) -> list[FailedRank]:
    """Return the ranks of this node that failed, the one to blame first; none if torchrun itself failed.

    Args:
        summary: the summary of torchrun, which lists the first failure last.
        words: the last lines of the standard error of every local rank.
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
    """Return the failed ranks of this node, the one to blame first.

    They are those that a launcher saw fail, and those whose own output says that they fail.

    Args:
        found: those that it saw, the first one first.
        words: the last lines of the standard error of every local rank.
    """
    # Ranks that agree print the same: then the one whose output is on the screen anyway.
    return sorted(
        [*found, *_unseen(found, words)],
        key=lambda rank: (rank.blame, rank.local_rank if rank.own_error else 0),
    )


def _unseen(found: Sequence[FailedRank], words: Mapping[int, Sequence[str]]) -> Iterator[FailedRank]:
    """Yield ranks that had printed why they fail, but were still ending when torchrun saw a victim of theirs."""
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
        # A rank that had said nothing may have ended well, and a victim's words blame nobody.
        if (rank.own_error or rank.raised) and not rank.is_victim:
            yield rank


def without_noise(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a rank without torch's lines before them and its teardown's after them."""
    return tuple(_PREFIX.sub("", line) for line in lines if line != _TEARDOWN)


_CAUSES = (
    (
        re.compile(r"port: (?P<port>\d+).*EADDRINUSE"),
        "port {port} of this machine is in use by another process; give all nodes another --master-port",
    ),
    (
        re.compile(r"Timed out after \d+ seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined"),
        "only {here} of {all} nodes came together in time; start the others with the same plan and --master-addr, or "
        "wait longer with --join-timeout",
    ),
    (
        re.compile(
            r"client socket has timed out after \d+ms while trying to connect to \((?P<host>[^,]+), (?P<port>\d+)"
        ),
        "node 0 does not answer at {host}:{port}; start it, make sure that --master-addr and --master-port are its "
        "own, or wait longer with --join-timeout",
    ),
    (
        re.compile(r"DistStoreError: wait timeout after \d+ms, keys: \S*torchelastic/"),
        "the other nodes of this job did not come to the store at --master-addr and --master-port in time: it may be "
        "another job's; give node 0's address and a free port, or wait longer with --join-timeout",
    ),
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
    """Return why the nodes did not come together, out of torchrun's log; "" for any other reason."""
    for pattern, text in _CAUSES:
        match = pattern.search(log)
        if match is not None:
            return text.format(**match.groupdict())
    return ""
