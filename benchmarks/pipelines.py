"""Strategies on ranks that are pipelines: `python -m benchmarks.pipelines`.

Every family is planned for 64 ranks of P stages (and V blocks of layers on each), under Qwen3-8B's example profile, by
every strategy at several token budgets. All are priced by the same timeline, which is exact. Per strategy: the seconds
of a step at its best budget and sync, over `fcp`'s, and the idle share; and `waves`, which is what fcp planned when it
took pipelines for waves, at the whole budget.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import replace

import numpy as np

from benchmarks.workloads import FAMILIES, example_profile, family_table
from fcp_cli.errors import PlanError
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.pipelines import pipeline_of
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver

NAMES = ("fcp", "waves", "fcp-paper", "bytescale", "megatron-dynamic-cp", "static")
PARTS = (1.0, 0.5, 0.25)  # of the token budget


def best(name: str, table_batches: GlobalBatches) -> tuple[float, float]:
    """Seconds and idle share of a strategy's quickest step, over budgets and syncs; infinite where none can run."""
    problem = table_batches.problem
    interleaved = problem.pipeline is not None and problem.pipeline.virtual_stages > 1
    syncs: tuple[Sync, ...] = ("microbatch",) if interleaved or name == "waves" else ("microbatch", "iteration")
    found = [(float("inf"), 0.0)]
    for part in PARTS if name not in ("fcp", "waves") else PARTS[:1]:
        for sync in syncs:
            priced = replace(problem, sync=sync, tokens_per_rank=int(problem.tokens_per_rank * part))
            planned = replace(priced, pipeline=None) if name == "waves" else priced
            try:
                batches = GlobalBatches(table_batches.table, planned, table_batches.settings)
                batch = batches.batch(0)
                step = assemble(
                    make_solver("fcp" if name == "waves" else name, batches).assign(batch), batch, priced, 1.0
                )
            except PlanError:
                continue
            found.append((step.makespan_seconds, step.idle_fraction(problem.num_ranks)))
    return min(found)


def run(stages: int, virtual: int, *, ranks: int, budget: int, seeds: int) -> None:
    """Print a table for one cut of the ranks."""
    profile, shape = (
        example_profile(),
        JobRanks(num_ranks=ranks, ranks_per_node=8, pipeline_parallel=stages, virtual_stages=virtual),
    )
    problem = Problem(
        num_ranks=ranks,
        ranks_per_node=8,
        tokens_per_rank=budget,
        sync="microbatch",
        profile=profile,
        pipeline_parallel=stages,
        pipeline=pipeline_of(profile, shape, None),
    )
    settings = BatchSettings(global_batch_size=512, shuffle=False)
    seconds: dict[str, list[float]] = defaultdict(list)
    idle: dict[str, list[float]] = defaultdict(list)
    for family in FAMILIES:
        for seed in range(seeds):
            batches = GlobalBatches(family_table(family, sequences=512, seed=seed), problem, settings)
            for name in NAMES if stages > 1 else [name for name in NAMES if name != "waves"]:
                taken, waiting = best(name, batches)
                seconds[name].append(taken)
                idle[name].append(waiting)
    print(f"\nP = {stages}, V = {virtual}\n\n| strategy | {' | '.join(FAMILIES)} | over fcp | idle |")
    print("|---" * (len(FAMILIES) + 3) + "|")
    for name, values in seconds.items():
        over = np.exp(np.mean(np.log(np.array(values) / np.array(seconds["fcp"]))))
        cells = " | ".join(f"{np.mean(values[at * seeds : (at + 1) * seeds]):.2f}" for at in range(len(FAMILIES)))
        print(f"| {name} | {cells} | {over:.2f}x | {statistics.fmean(idle[name]):.0%} |", flush=True)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cuts", nargs="+", default=["1x1", "2x1", "4x1", "8x1", "4x2"], help="stages x blocks on each"
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for cut in options.cuts:
        stages, virtual = map(int, cut.split("x"))
        run(stages, virtual, ranks=options.ranks, budget=options.budget, seeds=options.seeds)


if __name__ == "__main__":
    main()
