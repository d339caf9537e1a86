"""Starts torchrun jobs for tests, and reads what their ranks left."""

from __future__ import annotations

import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

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


def run_worker(worker: str, folder: Path, *words: str, num_ranks: int) -> dict[str, list[Any]]:
    """Run a worker of `tests/runtime/workers` in a folder; return what each rank left of each case, by its name."""
    torchrun("-m", f"tests.runtime.workers.{worker}", str(folder), *words, num_ranks=num_ranks)
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.pickle")):
        found.setdefault(path.stem.rpartition("-")[0], []).append(pickle.loads(path.read_bytes()))
    return found
