"""Time, memory and size of plans of 10^6 sequences and more: `python -m benchmarks.plan_size 1e6 1e7`.

Each manifest is written by a stream of draws, and planned in a process of its own, whose peak memory is split into its
own pages and those of files, which the system takes back. Then a cursor resumes at the plan's last step. With `--keep
FOLDER` manifests and plans stay there, and the same command continues what was interrupted.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.workloads import example_profile
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.journal import is_begun
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.runtime.cursor import PlanCursor
from fcp_cli.util.files import replaced_atomically

_CHUNK_ROWS = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=float, nargs="+")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--global-batch-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, help="plan only the first; default: all")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="continue here after an interruption")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        _plan(options.child, options)
        return
    for rows in map(int, options.rows):
        with tempfile.TemporaryDirectory() as folder:
            manifest = (options.keep or Path(folder)) / f"lengths-{rows}.parquet"
            manifest.parent.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            if not manifest.exists():
                with replaced_atomically(manifest) as temporary:
                    write_manifest(temporary, rows)
            written = time.perf_counter() - began
            print(f"{rows:,} sequences, {manifest.stat().st_size / 1e6:.0f} MB, written in {written:.0f} s", flush=True)
            common = [f"--{name}={value}" for name, value in _common(options).items() if value is not None]
            subprocess.run(
                [sys.executable, "-m", "benchmarks.plan_size", str(rows), f"--child={manifest}", *common], check=True
            )


def _common(options: argparse.Namespace) -> dict[str, int | None]:
    names = ("ranks", "global_batch_size", "steps", "workers")
    return {name.replace("_", "-"): getattr(options, name) for name in names}


def write_manifest(path: Path, rows: int, *, seed: int = 0) -> None:
    """Write lengths of a lognormal draw, a chunk at a time; chunks do not depend on how many there are."""
    with pq.ParquetWriter(path, pa.schema([("length", pa.int32())]), compression="zstd") as writer:
        for chunk, first in enumerate(range(0, rows, _CHUNK_ROWS)):
            draw = np.random.default_rng([seed, chunk]).lognormal(6.5, 1.2, _CHUNK_ROWS)
            lengths = np.clip(draw, 1, 65_536).astype(np.int32)[: rows - first]
            writer.write_table(pa.table({"length": lengths}))


def _plan(manifest: Path, options: argparse.Namespace) -> None:
    plan = manifest.with_name(manifest.name.replace("lengths", "plan"))
    peak = _Peak()
    began = time.perf_counter()
    table = read_manifest(manifest)
    read = time.perf_counter() - began
    problem = Problem(
        num_ranks=options.ranks, ranks_per_node=8, tokens_per_rank=16_384, sync="iteration", profile=example_profile()
    )
    settings = BatchSettings(global_batch_size=options.global_batch_size, step_limit=options.steps)
    inputs = PlanInputs(table=table, problem=problem, settings=settings)
    result = make_plan(
        plan,
        inputs,
        workers=options.workers,
        resume=is_begun(plan),
        on_step=_Progress(),
    )
    peak.stop()
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(one.ru_utime + one.ru_stime for one in usage)
    sequences = result.summary.sequences
    print(
        f"  read in {read:.1f} s; {result.metadata.steps:,} steps in {time.perf_counter() - began:.0f} s, "
        f"{busy:.0f} s of processors ({1e6 * busy / sequences:.1f} us a sequence); "
        f"peak {peak.own_mb:.0f} MB of its own, {peak.files_mb:.0f} MB of files; "
        f"plan of {plan.stat().st_size / 1e6:.0f} MB, shuffled {result.metadata.shuffle_kind or 'by permutation'}",
        flush=True,
    )
    last = result.metadata.end_step - 1
    seconds, processor = _timed(lambda: next(iter(PlanCursor(plan, 0, first_step=last, ahead=0))))
    print(f"  a cursor at step {last:,} after {seconds:.2f} s ({processor:.2f} s of processor)", flush=True)


class _Progress:
    """Prints a line a minute."""

    def __init__(self) -> None:
        self._began = self._told = time.perf_counter()
        self._first: int | None = None

    def __call__(self, step: StepPlan) -> None:
        now = time.perf_counter()
        self._first = step.step if self._first is None else self._first
        if now - self._told > 60.0:
            self._told = now
            rate = (step.step - self._first) / (now - self._began)
            print(f"  step {step.step:,} after {now - self._began:.0f} s, {rate:.1f} steps/s", flush=True)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    began, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - busy


class _Peak:
    """The most memory of this process, looked at ten times a second."""

    def __init__(self) -> None:
        self.own_mb = self.files_mb = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            self.own_mb = max(self.own_mb, int(found["RssAnon"].split()[0]) / 1e3)
            self.files_mb = max(self.files_mb, int(found["RssFile"].split()[0]) / 1e3)


if __name__ == "__main__":
    main()
