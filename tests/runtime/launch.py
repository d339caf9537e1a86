"""Starts torchrun jobs for tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fcp_cli.machine.torchrun import torchrun_argv
from tests.forked_ranks import shared
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def torchrun(*program: str, num_ranks: int, **environment: str) -> None:
    """Run `program` (as after `torchrun`) on gloo ranks; a failing rank fails the test with what it said."""
    path = os.pathsep.join([environment.pop("PYTHONPATH", str(ROOT)), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [*torchrun_argv(num_ranks), *program],
        cwd=ROOT,
        env={**os.environ, **shared(), "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
