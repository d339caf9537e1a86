"""Gap, idle time and planning seconds of what a user gets: the recipe that `fcp plan` chooses, cell by cell.

    python -m benchmarks.default_gaps --manifests wlb_llm_lengths.parquet linux_source.parquet
    python -m benchmarks.default_gaps --models qwen3-8b --clusters h100 --ranks 64 --steps 2

A cell is one set of lengths, model, cluster and number of ranks; models that do not fit are skipped. A step has 512
sequences, or eight per rank if that is more. Seconds are of the processor: of the recipe's search, and of planning a
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.real_lengths import drawn
from fcp_cli.errors import UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.recipe import RecipeData
from fcp_cli.planning.settings import resolve_problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.console import Assumptions

MODELS = ("qwen3-8b", "qwen3-vl-8b", "llama3-70b")
CLUSTERS = ("h100", "h200", "ascend910b")
RANKS = (8, 64, 512)
DRAWN = ("github", "commoncrawl", "wikipedia", "extreme", "video", "bimodal", "longalign")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The plan of a few steps under the recipe that the search chose.

    Attributes:
        tokens: token budget of a rank.
        recomputes: kind of recomputation.
        gap, idle: planned over proven bound - 1, and share of idle rank-seconds, over all steps.
        search_seconds, step_seconds: processor seconds of the recipe's search, and of planning a step.
    """

    lengths: str
    model: str
    cluster: str
    ranks: int
    sync: Sync
    tokens: int
    recomputes: str
    gap: float
    idle: float
    search_seconds: float
    step_seconds: float


def cell(name: str, table: LengthTable, model: str, cluster: str, ranks: int, *, size: int) -> Cell:
    """Plan one cell."""
    settings = BatchSettings(global_batch_size=size)
    request = PlanRequest(model=model, cluster=f"{cluster}-{max(1, ranks // 8)}x8")
    start = time.process_time()
    problem, _ = resolve_problem(request, Assumptions(), data=RecipeData(table=table, settings=settings))
    searched = time.process_time() - start
    batches = GlobalBatches(table, problem, settings)
    solver = make_solver("fcp", batches)
    start = time.process_time()
    steps = [assemble(solver.assign(batch), batch, problem) for batch in batches]
    planned = time.process_time() - start
    seconds = np.array([step.makespan_seconds for step in steps])
    recipe = problem.recipe
    assert recipe is not None
    return Cell(
        lengths=name,
        model=model,
        cluster=cluster,
        ranks=ranks,
        sync=problem.sync,
        tokens=problem.tokens_per_rank,
        recomputes=recipe.recompute,
        gap=float(seconds.sum() / sum(step.bound_seconds for step in steps)) - 1.0,
        idle=float(np.average([step.idle_fraction(ranks) for step in steps], weights=seconds)),
        search_seconds=searched,
        step_seconds=planned / len(steps),
    )


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Plan every cell whose model fits."""
    manifests = {path.stem: path for path in options.manifests}
    for ranks, name in product(options.ranks, options.lengths or [*DRAWN, *manifests]):
        size = max(512, 8 * ranks)
        steps = options.steps if ranks <= 64 else 1
        tokens = drawn(name, sequences=size * steps, manifests=manifests, repeats=True)
        table = LengthTable(name=name, length_tokens=tokens)
        for cluster, model in product(options.clusters, options.models):
            with suppress(UsageError):  # the model does not fit
                yield cell(name, table, model, cluster, ranks, size=size)


def show(found: Sequence[Cell]) -> None:
    """Print gaps by lengths, and by model, cluster and ranks, as Markdown."""
    columns = sorted({(one.ranks, one.model) for one in found})
    clusters = list(dict.fromkeys(one.cluster for one in found))
    print(f"| gap, % ({', '.join(clusters)}) | " + " | ".join(f"{model}, {ranks}" for ranks, model in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    by_name: dict[str, dict[tuple[int, str, str], Cell]] = defaultdict(dict)
    for one in found:
        by_name[one.lengths][one.ranks, one.model, one.cluster] = one
    for name, of_name in by_name.items():
        texts = []
        for column in columns:
            there = (of_name.get((*column, cluster)) for cluster in clusters)
            texts.append(", ".join("–" if one is None else f"{100 * one.gap:.1f}" for one in there))
        print(f"| {name} | {' | '.join(texts)} |")
    print("\n| ranks | cells | gap: mean, most | idle: mean, most | search s: median, most | step ms: median, most |")
    print("|---" * 6 + "|")
    for ranks in sorted({one.ranks for one in found}):
        of_ranks = [one for one in found if one.ranks == ranks]
        gaps, idle = ([100 * getattr(one, key) for one in of_ranks] for key in ("gap", "idle"))
        searches, steps = [one.search_seconds for one in of_ranks], [1e3 * one.step_seconds for one in of_ranks]
        print(
            f"| {ranks} | {len(of_ranks)} | {statistics.fmean(gaps):.2f} %, {max(gaps):.1f} % "
            f"| {statistics.fmean(idle):.1f} %, {max(idle):.1f} % "
            f"| {statistics.median(searches):.1f}, {max(searches):.1f} "
            f"| {statistics.median(steps):.0f}, {max(steps):.0f} |"
        )
    gaps = sorted(100 * one.gap for one in found)
    above = sum(gap > 5 for gap in gaps)
    print(f"\n{len(gaps)} cells: mean gap {statistics.fmean(gaps):.2f} %, most {gaps[-1]:.1f} %, {above} above 5 %")


def main() -> None:
    """Plan the cells, or read those of earlier runs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifests", type=Path, nargs="*", default=[], help="Parquet files with a column length")
    parser.add_argument("--lengths", nargs="+", help="sets of lengths, by name; all unless given")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, help="accelerators, in nodes of eight")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="one device each")
    parser.add_argument("--steps", type=int, default=2, help="per cell; one above 64 ranks")
    parser.add_argument("--cells", type=Path, help="write every cell as a line of JSON, too")
    parser.add_argument("--read", type=Path, nargs="+", help="print the tables of these files of cells")
    options = parser.parse_args()
    if options.read:
        show([Cell(**json.loads(line)) for path in options.read for line in path.read_text().splitlines()])
        return
    found = []
    for one in cells(options):
        found.append(one)
        print(
            f"{one.lengths:16} {one.model:12} {one.ranks:4} {one.cluster:10} {one.sync:10} {one.recomputes:10} "
            f"{one.tokens:8,} gap {100 * one.gap:5.2f} % idle {100 * one.idle:5.1f} % "
            f"search {one.search_seconds:5.2f} s step {1e3 * one.step_seconds:6.0f} ms",
            flush=True,
        )
        if options.cells:
            with options.cells.open("a") as lines:
                lines.write(json.dumps(asdict(one)) + "\n")
    show(found)


if __name__ == "__main__":
    main()
