"""Puts the compiled planner into the wheel, where `python hatch_build.py` has made one; a wheel without is as good.

    $ python hatch_build.py      # in an environment with fcp: about a minute of CPU time; then build the wheel
    $ python -m build --sdist --wheel

The machine code is for one minor version of Python, one version of numba and one architecture, whatever the processor.
On any other, `fcp` compiles its planner on the first plan, as it does from a checkout. Running this under several
Pythons collects the code for all of them.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMPILED = Path(__file__).parent / "build" / "compiled"


def collect() -> None:
    """Compile planner and pipelines afresh, and keep what a process that only plans and compares loads of them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "PYTHONPATH": str(Path(__file__).parent)}
        for kept in ("", str(COMPILED)):  # what the first process compiles, the second one loads
            subprocess.run([sys.executable, __file__, kept], check=True, env=environment, cwd=folder)


def plan_everything() -> None:
    """Run every strategy on one small step under both syncs, without and with pipelines, in this process."""
    from fcp_cli.cli.app import app

    lengths = "\n".join(str(64 + 97 * i % 4000 + (30_000 if i % 20 == 0 else 0)) for i in range(80))
    Path("lengths.jsonl").write_text(lengths, encoding="utf-8")
    step = ["-q", "compare", "lengths.jsonl", "--model", "qwen3-8b", "--ranks", "16", "--steps", "1"]
    for options in ([], ["--pipeline-parallel", "2"]):
        app([*step, *options], standalone_mode=False)


def keep_loaded(folder: Path) -> None:
    """Copy the cache entries of the functions that Python itself called: what these call in turn is inside them."""
    from numba.core.dispatcher import Dispatcher

    folder.mkdir(parents=True, exist_ok=True)
    dispatchers: list[Any] = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
    for dispatcher in dispatchers:
        if sum(dispatcher.stats.cache_hits.values()):
            cache = dispatcher._cache
            for file in Path(cache.cache_path).glob(f"{cache._impl.filename_base}.*"):
                shutil.copy2(file, folder)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        collect()
    else:
        plan_everything()
        if sys.argv[1]:
            keep_loaded(Path(sys.argv[1]))
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class CompiledPlanner(BuildHookInterface):  # type: ignore[type-arg]
        """Adds `build/compiled/`, if there is one, to the wheel."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name == "wheel" and COMPILED.is_dir():
                build_data["force_include"][str(COMPILED)] = "fcp_cli/_data/compiled"
