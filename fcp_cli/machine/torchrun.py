"""Builds torchrun command lines. Does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def torchrun_argv(
    processes: int, *, python: str = sys.executable, options: Sequence[str] = ("--standalone",)
) -> list[str]:
    """Return the command that starts `processes` ranks on a node; append the program and its arguments.

    torchrun runs as a module of `python`, never from PATH, which may belong to another environment.

    Args:
        processes: number of ranks on this node.
        python: interpreter of torchrun and the ranks.
        options: rendezvous and log options; by default a single node on any free port.
    """
    return [python, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", *options]
