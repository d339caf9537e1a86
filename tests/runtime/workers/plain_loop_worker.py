"""Runs a script in fp64 and saves the weights that a rank ends with: `plain_loop_worker.py SCRIPT OUTPUT`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def run_in_fp64(script: Path) -> dict[str, Any]:
    """What a script leaves under its names."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return runpy.run_path(str(script))
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(run_in_fp64(Path(sys.argv[1]))["model"].state_dict(), f"{sys.argv[2]}.{os.environ['RANK']}")
