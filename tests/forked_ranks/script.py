"""Run a script as `python SCRIPT ARGS` does: `-m tests.forked_ranks.script SCRIPT ARGS`, by the server of all jobs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
