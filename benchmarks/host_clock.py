"""Rings that come and go if hosts have a clock of their own, and the time that planning with it takes.

    python -m benchmarks.host_clock --manifests wlb_llm_lengths.parquet

Qwen3-8B on 64 H100s, 512 sequences a step, 16,384 tokens a rank. Plans each step under the computed profile, and under
the one that adds the host's seconds and messages to the devices', as before hosts had a clock. Prints rings of two
ranks and more, rings whose degree only one of both plans has, the steps of each plan under the profile with two clocks,
and milliseconds of planning: the least of `--repeats`.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.workloads import FAMILIES, family_table, real_table
from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Assignment, Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile

RANKS, SEQUENCES, BUDGET = 64, 512, 16_384


def profile_of(cluster: ClusterSpec, sync: Sync) -> CostProfile:
    """Compute the profile of Qwen3-8B, ZeRO-3 with full recomputation in waves, else ZeRO-1."""
    recipe = Recipe(zero_stage=3 if sync == "microbatch" else 1, recompute="full")
    return analytic_profile(load_model("qwen3-8b"), cluster, recipe=recipe, sync=sync, ranks=RANKS)


def one_clock(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster whose profiles add the host's seconds to the devices'."""
    message_seconds = cluster.message_seconds + (cluster.host_message_seconds or 0.0)
    return replace(cluster, host_message_seconds=None, message_seconds=message_seconds)


def rings(assignment: Assignment) -> Counter[int]:
    """Count rings of two ranks and more by degree."""
    return Counter(degree for degree in np.diff(assignment.rank_offsets).tolist() if degree > 1)


def planned(batches: GlobalBatches, *, repeats: int) -> tuple[list[Assignment], float]:
    """Plan all steps; return them with the least milliseconds a step of `repeats`."""
    found, seconds = [], []
    for _ in range(repeats):
        solver, start = make_solver("fcp", batches), time.perf_counter()
        found = [solver.assign(batch) for batch in batches]
        seconds.append(time.perf_counter() - start)
    return found, 1e3 * min(seconds) / len(found)


def compared(table: LengthTable, sync: Sync, *, steps: int, repeats: int) -> str:
    """Return the row of a table."""
    cluster = load_cluster("h100-8x8")
    settings = BatchSettings(global_batch_size=SEQUENCES)
    table = replace(table, length_tokens=table.length_tokens[: SEQUENCES * steps])
    plans = []
    for priced in (one_clock(cluster), cluster):
        problem = Problem(
            num_ranks=RANKS, ranks_per_node=8, tokens_per_rank=BUDGET, sync=sync, profile=profile_of(priced, sync)
        )
        batches = GlobalBatches(table, problem, settings)
        plans.append(planned(batches, repeats=repeats))
    before, now = (sum(map(rings, assignments), Counter()) for assignments, _ in plans)
    seconds = [
        sum(assemble(one, batch, problem, 0.0).makespan_seconds for one, batch in zip(plan, batches, strict=True))
        / steps
        for plan, _ in plans
    ]
    counts = (before.total(), now.total(), (before - now).total(), (now - before).total())
    times = " | ".join(f"{one:.4g} s" for one in seconds)
    planning = " | ".join(f"{one:.1f}" for _, one in plans)
    return f"| {table.name} | {sync} | {' | '.join(map(str, counts))} | {times} | {planning} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifests", nargs="*", type=Path, default=[])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    tables = [family_table(family, sequences=SEQUENCES * given.steps, seed=0) for family in FAMILIES]
    tables += [real_table(path) for path in given.manifests]
    print("| lengths | sync | rings before | now | gone | new | step before | now | ms before | now |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for table in tables:
        for sync in ("iteration", "microbatch"):
            print(compared(table, sync, steps=given.steps, repeats=given.repeats), flush=True)


if __name__ == "__main__":
    main()
