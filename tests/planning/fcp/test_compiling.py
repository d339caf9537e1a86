"""Compiled kernels never outlive the code that they were compiled from, and need no folder to write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fcp_cli.planning.fcp.compiling import discard_stale_kernels
from tests.patience import PATIENCE_SECONDS


def kept_in(folder: Path | None) -> SimpleNamespace:
    """A stand-in for a compiled function that is kept in a folder."""
    return SimpleNamespace(stats=SimpleNamespace(cache_path=None if folder is None else str(folder)))


def test_kernels_of_other_sources_are_removed_once(tmp_path: Path) -> None:
    old = tmp_path / "sand.fill-1.py311.nbi"
    old.write_text("compiled from older sources")
    discard_stale_kernels(kept_in(tmp_path))
    assert not old.exists()
    old.write_text("compiled from these sources")
    discard_stale_kernels(kept_in(tmp_path))
    assert old.exists()


def test_kernels_that_are_not_kept_need_no_care() -> None:
    discard_stale_kernels(kept_in(None))


@pytest.mark.processes
def test_the_planner_compiles_where_nothing_can_be_written() -> None:
    program = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from fcp_cli.planning.fcp import core\n"
        "import numpy as np\n"
        "tree = core.make_tree(3)\n"
        "core.set_room(tree, 2, 5.0, 7)\n"
        "assert core.first_with_room(tree, 4.0, 7, 0) == 2\n"
        "assert core.make_tree.stats.cache_path is None\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


_HASH_OF_PLANS = """
import hashlib
import numpy as np
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp.solver import make_solver
from fcp_cli.planning.run import plan_step
from tests.planning.examples import example_problem, long_tail

SYNCS = ("iteration", "microbatch")
digest = hashlib.sha256()
for sync, padding, steps in (*((sync, None, 3) for sync in SYNCS), *((sync, 4, 1) for sync in SYNCS)):
    settings = BatchSettings(global_batch_size=41, step_limit=steps)
    batches = GlobalBatches(long_tail(120), example_problem(sync, padding_multiple=padding), settings)
    solver = make_solver(batches)
    for batch in batches:
        step = plan_step(batch, batches.problem, solver)
        for values in (step.ranks, step.sequences, step.start_seconds, step.seconds, np.array(step.bound_seconds)):
            digest.update(values.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.processes
def test_compiled_and_interpreted_planners_make_the_same_plan_to_the_last_bit() -> None:
    def printed(**environment: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", _HASH_OF_PLANS],
            check=True,
            timeout=PATIENCE_SECONDS,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd()), **environment},
        )
        return run.stdout

    assert printed() == printed(NUMBA_DISABLE_JIT="1")
