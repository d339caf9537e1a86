"""What prices by attention kernel change in plans: `python -m benchmarks.kernel_prices [--seeds 2] [--lengths FILE]`.

Steps of 512 sequences on 64 ranks, planned under one efficiency for any kernel and under the rates of the kernel that
runs, both priced by the rates. The third and fourth columns of figures are those of steps, fcp's own plans under each.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.workloads import FAMILIES, family_table, real_table
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import KernelName, Recipe
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile

MODEL: Final = "qwen3-8b"
# Cluster -> kernel, and the one efficiency that was assumed for any before kernels had rates.
CASES: Final[tuple[tuple[str, KernelName, float], ...]] = (
    ("h100", "cudnn", 0.5),
    ("h100", "fa2", 0.5),
    ("a100", "fa2", 0.45),
)
SYNCS: Final[tuple[Sync, ...]] = ("iteration", "microbatch")
RANKS, PER_NODE, SEQUENCES, BUDGETS = 64, 8, 512, (8_192, 16_384)


def profile_of(cluster: ClusterSpec) -> CostProfile:
    """Compute the profile of the model, activations recomputed."""
    recipe = Recipe(zero_stage=3, recompute="full")
    profile = analytic_profile(load_model(MODEL), cluster, recipe=recipe, sync="microbatch", ranks=RANKS)
    return replace(profile, text=dump_cost_profile(profile))


def step_seconds(profiles: tuple[CostProfile, CostProfile], table: LengthTable, budget: int, sync: Sync) -> list[float]:
    """Return seconds of one step: planned under each of (one efficiency, rates), by the rates; the first by its own."""
    old, new = (batches_of(profile, table, budget, sync) for profile in profiles)
    plans = [make_solver("fcp", batches).assign(batches.batch(0)) for batches in (old, new)]
    found = [assemble(plan, new.batch(0), new.problem).makespan_seconds for plan in plans]
    return [*found, assemble(plans[0], old.batch(0), old.problem).makespan_seconds]


def batches_of(profile: CostProfile, table: LengthTable, budget: int, sync: Sync) -> GlobalBatches:
    """Return one step of all sequences."""
    problem = Problem(num_ranks=RANKS, ranks_per_node=PER_NODE, tokens_per_rank=budget, sync=sync, profile=profile)
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=SEQUENCES, shuffle=False))


def main() -> None:
    """Print one table in Markdown."""
    parser = argparse.ArgumentParser(description="What prices by attention kernel change in plans.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lengths", type=Path, help="a manifest to plan, too, its rows drawn at random")
    options = parser.parse_args()
    drawn = [(f, family_table(f, sequences=SEQUENCES, seed=s)) for f, s in product(FAMILIES, range(options.seeds))]
    if options.lengths:
        rows = real_table(options.lengths)
        for seed in range(options.seeds):
            chosen = np.random.default_rng(seed).choice(len(rows), SEQUENCES, replace=False)
            lengths = np.minimum(rows.length_tokens[chosen], RANKS * min(BUDGETS))
            drawn.append(("given", LengthTable(name="given", length_tokens=lengths)))
    print("| cluster, kernel | sync | tokens a rank | lengths | old plans over new ones | old prices over the rates |")
    print("|---|---|---|---|---|---|")
    for (name, kernel, efficiency), sync, budget in product(CASES, SYNCS, BUDGETS):
        cluster = load_cluster(name)
        one = replace(cluster, attention={}, attention_efficiency=efficiency)
        profiles = profile_of(one), profile_of(cluster.running(kernel))
        for label in dict.fromkeys(label for label, _ in drawn):
            found = np.array([step_seconds(profiles, t, budget, sync) for each, t in drawn if each == label])
            plans, prices = (math.exp(float(np.log(found[:, i] / found[:, 1]).mean())) for i in (0, 2))
            print(f"| {name}, {kernel} | {sync} | {budget:,} | {label} | {plans:.3f} | {prices:.2f} |", flush=True)


if __name__ == "__main__":
    main()
