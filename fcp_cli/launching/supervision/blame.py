"""Finds the root cause among several failed ranks, or of a failed rendezvous. Pure functions of log texts.

When one rank fails, its peers lose their connection and fail within milliseconds, and torchrun may see them first. So
a rank's own error message takes precedence over torchrun's order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
        """Last line of its traceback (exception and message), else ""."""
        return next((line.strip() for line in reversed(self.words) if _RAISED.match(line)), "")

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
    """Return the reason of a failed rendezvous from torchrun's log; "" if it failed otherwise."""
    for pattern, text in _CAUSES:
        match = pattern.search(log)
        if match is not None:
            return text.format(**match.groupdict())
    return ""
