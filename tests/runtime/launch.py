"""Starts torchrun jobs for tests, and reads what their ranks left."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from fcp_cli.util.processes import torchrun_argv
from tests.forked_ranks import shared
from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]


def torchrun(*program: str, num_ranks: int, **environment: str) -> str:
    """Run `program` (as after `torchrun`) on gloo ranks; return what they print. A failing rank fails the test."""
    return _run([*torchrun_argv(num_ranks), *program], ROOT, environment)


def forked(module: str, *words: str, folder: Path = ROOT) -> str:
    """Run a module as `python -m` does, but with PyTorch imported before, and return what it printed."""
    return _run([sys.executable, "-m", "tests.forked_ranks", module, *words], folder, {})


def forked_script(script: Path, *words: str, folder: Path) -> None:
    """Run a script as `python` does, but with PyTorch imported before."""
    forked("tests.forked_ranks.script", str(script), *words, folder=folder)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    path = os.pathsep.join([environment.pop("PYTHONPATH", str(ROOT)), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **shared(), "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def run_worker(worker: str, folder: Path, *words: str, num_ranks: int) -> dict[str, list[Any]]:
    """Run a worker of `tests/runtime/workers` in a folder; return what each rank left of each case, by its name."""
    torchrun("-m", f"tests.runtime.workers.{worker}", str(folder), *words, num_ranks=num_ranks)
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.pickle")):
        found.setdefault(path.stem.rpartition("-")[0], []).append(pickle.loads(path.read_bytes()))
    return found
