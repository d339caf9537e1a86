"""How long `fcp --help` and a small `fcp plan` take: waiting and CPU seconds, the best of several starts.

    python -m benchmarks.startup

The first `fcp plan` ever on a machine also compiles the planner; `--cold` measures that, with an empty cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_STARTS = 7
_HELP_LIMIT_SECONDS = 0.3  # of CPU time: the exit status must not depend on what else the machine does


def seconds(arguments: list[str], folder: Path, starts: int, **environment: str) -> tuple[float, float]:
    """Waiting and CPU seconds of `fcp`, the least of several starts; a busy machine only lengthens the first much."""
    waited, busy = [], []
    for _ in range(starts):
        started, before = time.perf_counter(), _children_seconds()
        subprocess.run(
            [sys.executable, "-m", "fcp_cli", *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        waited.append(time.perf_counter() - started)
        busy.append(_children_seconds() - before)
    return min(waited), min(busy)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(what: str, measured: tuple[float, float]) -> None:
    print(f"{what:<32} {measured[0]:7.3f} s, CPU {measured[1]:7.3f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true", help="also with an empty cache of compiled code")
    cold = parser.parse_args().cold
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", _MAKE_DATASET], cwd=folder, check=True)
        help_seconds = seconds(["--help"], folder, _STARTS)
        report("fcp --help", help_seconds)
        for solver in ("static", "fcp"):
            plan = ["plan", "dataset.parquet", "--solver", solver]
            seconds(plan, folder, 1)
            report(f"fcp plan, 512 rows, {solver}", seconds(plan, folder, 3))
        if cold:
            cache = {"NUMBA_CACHE_DIR": str(folder / "cache")}
            report("fcp plan, nothing compiled yet", seconds(["plan", "dataset.parquet"], folder, 1, **cache))
    return 0 if help_seconds[1] < _HELP_LIMIT_SECONDS else 1


_MAKE_DATASET = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
lengths = np.random.default_rng(0).lognormal(7, 1.2, 512).astype(np.int64).clip(1, 100_000)
pq.write_table(pa.table({"length": lengths}), "dataset.parquet")
"""


if __name__ == "__main__":
    sys.exit(main())
