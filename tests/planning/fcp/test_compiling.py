"""Compiled kernels never outlive the code that they were compiled from, and need no folder to write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from fcp_cli.planning.fcp.compiling import discard_stale_kernels


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
        [sys.executable, "-c", program], check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
    )
