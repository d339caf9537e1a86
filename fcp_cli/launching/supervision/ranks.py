"""The ranks of one node, whichever launcher starts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from fcp_cli.launching.supervision.failure import TorchrunRanks
from fcp_cli.launching.supervision.msrun_ranks import MsrunRanks

NodeRanks: TypeAlias = TorchrunRanks | MsrunRanks


def ranks_of(argv: Sequence[str], log_dir: Path) -> NodeRanks:
    """Return the ranks that a launcher's command starts; their output is in `log_dir`."""
    return MsrunRanks(argv, log_dir) if Path(argv[0]).name == "msrun" else TorchrunRanks(log_dir)
