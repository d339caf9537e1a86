"""The ranks of one node, whichever launcher starts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fcp_cli.launching.supervision.failure import Failure, TorchrunRanks
from fcp_cli.launching.supervision.msrun_ranks import MsrunRanks


class NodeRanks(Protocol):
    """The ranks of this node, as one of the launchers starts them.

    Attributes:
        log: output of the launcher itself.
        streams: names of a rank's output files.
    """

    log: Path
    streams: tuple[str, ...]

    def rank_0(self, stream: str) -> Path | None:
        """Return where local rank 0 prints to a stream; None until it has been started."""
        ...

    def must_end(self, pid: int) -> bool:
        """Return whether the launcher, process `pid`, must be ended because a rank failed; call it often."""
        ...

    def ranks(self, pid: int) -> list[int]:
        """Return the processes of the ranks that run."""
        ...

    def find_failure(self, status: int) -> Failure:
        """Return who failed, after the launcher ended with `status`."""
        ...


def ranks_of(argv: Sequence[str], log_dir: Path) -> NodeRanks:
    """Return the ranks that a launcher's command starts; their output is in `log_dir`."""
    return MsrunRanks(argv, log_dir) if Path(argv[0]).name == "msrun" else TorchrunRanks(log_dir)
