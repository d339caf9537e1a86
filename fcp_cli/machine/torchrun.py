"""The command line of torchrun, wherever fcp starts it. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def torchrun_argv(
    processes: int, *, python: str = sys.executable, options: Sequence[str] = ("--standalone",)
) -> list[str]:
    """Return the words that start `processes` ranks on a node; the program and its arguments follow them.

    torchrun is started as a module of an interpreter, so that it never is the one of another environment on PATH.

    Args:
        processes: ranks on this node.
        python: the interpreter of torchrun and the ranks.
        options: how the nodes meet, and where the ranks print; by default one node, on any free port.
    """
    return [python, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *options]
