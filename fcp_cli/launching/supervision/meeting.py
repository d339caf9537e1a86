"""Announces once which nodes are missing at the rendezvous, during which a launcher is silent for minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fcp_cli.launching.job.job import Job
from fcp_cli.launching.supervision.failure import TorchrunRanks
from fcp_cli.machine.network import listens

_PATIENCE_SECONDS: Final = 20.0  # importing torch takes a launcher several seconds
_PROBE_SECONDS: Final = 2.0


@dataclass(kw_only=True, slots=True)
class NodeMeeting:
    """Rendezvous as seen by one node; `check` is called repeatedly while the job runs.

    Attributes:
        job: job with `log_dir` set.
        announce: receives the line.
        clock: time in seconds.
    """

    job: Job
    node_rank: int
    announce: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _check_at: float | None = field(init=False)

    def __post_init__(self) -> None:
        waits = self.job.num_nodes > 1 and self.job.join_timeout_seconds is not None
        # msrun starts ranks at once and they wait inside, so only a missing node 0 can be detected.
        can_see = self.node_rank > 0 or self.job.launcher == "torchrun"
        self._check_at = self.clock() + self._pause_seconds() if waits and can_see else None

    def check(self) -> None:
        """Announce the nodes that this one waits for, once and after `_PATIENCE_SECONDS`."""
        if self._check_at is None or self.clock() < self._check_at:
            return
        self._check_at = self.clock() + self._pause_seconds()
        host, port = self.job.master_addr, self.job.master_port
        assert self.job.log_dir is not None
        # torchrun starts ranks only after the rendezvous.
        if self.job.launcher == "torchrun" and TorchrunRanks(self.job.log_dir).rank_0("stdout") is not None:
            self._check_at = None
        elif listens(host, port, seconds=_PROBE_SECONDS):
            if self.node_rank:
                self._check_at = None  # node 0 is up, and announces missing nodes itself
            else:
                self._announce(f"waiting for the other nodes to come to {host}:{port}; run 'fcp launch' on each")
        elif self.node_rank:  # node 0 itself may still be importing torch
            self._announce(f"waiting for node 0: nothing listens at {host}:{port} yet; run 'fcp launch' there")

    def _announce(self, state: str) -> None:
        self._check_at = None
        self.announce(f"{state}; gives up after {self.job.join_timeout_seconds} s (--join-timeout)")

    def _pause_seconds(self) -> float:
        return min(_PATIENCE_SECONDS, (self.job.join_timeout_seconds or 0) / 3)
