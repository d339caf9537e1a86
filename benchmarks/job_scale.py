"""What a job of very many ranks does besides planning, counted: `python -m benchmarks.job_scale --ranks 65536`.

A plan of several steps is made, and then: bytes of a step in the file by column, seconds to prove the plan and to find
its connections at the start, the part of a file that one rank reads for a step, peers of a rank and rounds of first
contacts. A run of it is written as if all had gone as planned, for its bytes, and the time and memory of `fcp watch`
and `fcp report`.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from benchmarks.planner import SYNCS, problem_of
from benchmarks.workloads import FAMILIES, MAX_LENGTH, family_table
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.rings import PeerCount
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.runs.metrics import FORMAT, MetricsWriter, Timing, step_record
from fcp_cli.runtime.cursor import PlanCursor

Found = TypeVar("Found")


def main() -> None:
    """Print the counts of one family and sync."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=65_536)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=4, help="of a rank and step")
    parser.add_argument("--family", default="github", choices=FAMILIES)
    parser.add_argument("--sync", default="iteration", choices=SYNCS)
    parser.add_argument("--keep", type=Path, help="a folder in which the plan stays")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan = (options.keep or Path(folder)) / "plan.parquet"
        seconds = _timed(lambda: _make(plan, options))[0] / options.steps
        print(
            f"{options.ranks:,} ranks, {options.family}, {options.sync}: planned and written in {seconds:.2f} s a step"
        )
        _file(plan, options.steps)
        _start(plan, options.steps)
        _peers(plan)
        _run(plan)


def _make(plan: Path, options: argparse.Namespace) -> None:
    batch = options.sequences * options.ranks
    table = family_table(options.family, sequences=batch * options.steps, seed=0)
    problem = problem_of(options.sync, ranks=options.ranks, per_node=8, budget=16_384)
    settings = BatchSettings(global_batch_size=batch, shuffle=False, max_length=MAX_LENGTH, overlong="drop")
    make_plan(plan, PlanInputs(table=table, problem=problem, settings=settings), workers=1)


def _file(plan: Path, steps: int) -> None:
    footer, columns = pq.read_metadata(plan), Counter[str]()
    for group in range(footer.num_row_groups):
        for number in range(footer.num_columns):
            column = footer.row_group(group).column(number)
            columns[column.path_in_schema.split(".")[0]] += column.total_compressed_size
    shares = ", ".join(f"{name} {size / steps / 1e6:.2f}" for name, size in columns.most_common())
    print(
        f"a step: {plan.stat().st_size / steps / 1e6:.2f} MB in {footer.num_row_groups / steps:g} row groups ({shares})"
    )


def _start(plan: Path, steps: int) -> None:
    proven, _ = _timed(lambda: PlanReader(plan).content_hash())
    last = PlanReader(plan).metadata.end_step - 1
    opened, read = _timed(lambda: _bytes_read(plan, last))
    print(f"all rows hashed in {proven / steps:.3f} s a step; a rank is at the last step after {opened:.2f} s")
    print(f"which read {read / 1e6:.2f} MB")


def _bytes_read(plan: Path, step: int) -> int:
    before = _read_so_far()
    next(iter(PlanCursor(plan, 0, first_step=step, ahead=0)))
    return _read_so_far() - before


def _read_so_far() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def _peers(plan: Path) -> None:
    seconds, peers = _timed(lambda: _counted(plan))
    rank = int(peers.per_rank.argmax())
    print(
        f"{len(peers.pairs):,} connections found in {seconds:.1f} s: {peers.mean:.1f} a rank, at most {peers.most} "
        f"(rank {rank}), so fewer than {2 * peers.most} rounds of first contacts; after each step "
        + ", ".join(f"{mean:.1f}" for mean in peers.means())
    )


def _counted(plan: Path) -> PeerCount:
    reader = PlanReader(plan)
    peers = PeerCount(num_ranks=reader.metadata.num_ranks, ranks_per_node=reader.metadata.ranks_per_node)
    for step in reader.steps():
        peers.add(step)
    return peers


def _run(plan: Path) -> None:
    reader, metrics = PlanReader(plan), plan.with_name("metrics.jsonl")
    metadata = reader.metadata
    metrics.unlink(missing_ok=True)
    writer = MetricsWriter(metrics)
    facts = {"plan": str(plan), "plan_hash": metadata.plan_hash, "sync": metadata.sync, "steps": metadata.steps}
    shape = {"num_ranks": metadata.num_ranks, "ranks_per_node": metadata.ranks_per_node}
    writer.write({"kind": "run", "format": FORMAT, "first_step": 0, **shape, **facts})
    began = time.process_time()
    for step in reader.steps():
        writer.write(_as_planned(step, metadata.num_ranks))
    seconds = time.process_time() - began
    writer.close()
    size = metrics.stat().st_size / metadata.steps
    print(f"metrics: {size / 1e6:.1f} MB and {seconds / metadata.steps:.2f} s a step")
    page = plan.with_name("report.html")
    commands = [("watch", "--once", str(metrics)), ("report", str(plan), "--metrics", str(metrics), "-o", str(page))]
    for command in commands:
        usage = _usage_of([sys.executable, "-m", "fcp_cli", *command])
        print(f"fcp {command[0]}: {usage.ru_utime + usage.ru_stime:.1f} s, {usage.ru_maxrss / 1e3:.0f} MB")
    print(f"the page: {page.stat().st_size / 1e6:.1f} MB")


def _as_planned(step: StepPlan, num_ranks: int) -> dict[str, Any]:
    ranks: list[list[Timing]] = [[] for _ in range(num_ranks)]
    for row in step.microbatches():
        for rank in row.ranks:
            ranks[rank].append((row.order, row.start_seconds, row.seconds))
    return step_record(step, ranks, seconds=step.makespan_seconds, loss=1.0)


def _usage_of(command: list[str]) -> resource.struct_rusage:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _pid, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage


def _timed(work: Callable[[], Found]) -> tuple[float, Found]:
    began = time.process_time()
    found = work()
    return time.process_time() - began, found


if __name__ == "__main__":
    main()
