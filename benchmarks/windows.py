"""Sliding windows by halos against windows on the ring: `python -m benchmarks.windows [--seeds 4]`.

First one sequence of a model with windows in most layers, alone on d ranks. Rows: keys and values that the busiest
member gets in a layer with a window, by its halo and on a ring, counted from the runtime's own layout. Bytes: of all
layers together, those with full attention on the ring either way. Seconds: what the analytic profile predicts for the
same layers on rings, over what it predicts for halos.

Then what it is worth to plan with the price of what runs: steps of 512 sequences on 64 ranks, planned as if rings
carried all layers and planned with halos, both priced with halos.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np

from benchmarks.workloads import FAMILIES, lengths
from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.windows import halo_of

MODELS: Final = "gemma3-27b", "gpt-oss-20b"
CLUSTER, RANKS, PER_NODE = "h100-8x8", 64, 8
LENGTHS, DEGREES = (8_192, 32_768, 131_072), (2, 8, 16)
BUDGETS, SEQUENCES = (8_192, 16_384), 512
SYNCS: Final[tuple[Sync, ...]] = ("iteration", "microbatch")


def halo_rows(length: int, degree: int, window: int) -> int:
    """Return the rows that the busiest member of a ring gets where tokens attend to a window."""
    layout = shard_layout((length,), degree)
    return max(halo_of(layout, index, window - 1).received for index in range(degree))


def ring_rows(length: int, degree: int) -> int:
    """Return the rows that it gets where keys and values of all members pass by."""
    layout = shard_layout((length,), degree)
    return layout.total_tokens - min(layout.tokens(index) for index in range(degree))


def profile_of(spec: ModelSpec) -> CostProfile:
    """Compute the profile of a model on 64 ranks, activations recomputed."""
    recipe = Recipe(zero_stage=3, precision="bf16", recompute="full")
    return analytic_profile(spec, load_cluster(CLUSTER), recipe=recipe, sync="microbatch", ranks=RANKS)


def on_rings(profile: CostProfile, spec: ModelSpec) -> CostProfile:
    """Return the profile of the same model if rings carried the keys and values of all its layers."""
    c, more = profile.coefficients, (spec.ring_layers + spec.window_layers) / spec.ring_layers
    names = (
        *("ring_bytes_per_token", "ring_hop_seconds", "chunk_seconds_per_token"),
        *("last_hop_bytes_per_token", "last_hop_seconds"),
    )
    rings = replace(c, **{name: more * getattr(c, name) for name in names})
    profile = replace(profile, coefficients=replace(rings, halo_bytes_per_token=0.0, halo_message_seconds=0.0))
    return replace(profile, text=dump_cost_profile(profile))


def seconds(profile: CostProfile, length: int, degree: int) -> float:
    """Predict one sequence on one group, which crosses nodes where it is wider than one."""
    work = causal_work(np.array([length]), profile.coefficients)
    return float(group_seconds(profile, work, degree=degree, crosses_nodes=degree > PER_NODE)[0])


def print_sequences() -> None:
    """Print the table of single sequences."""
    print(
        "| model | window | tokens | ranks | rows, halo | rows, ring | bytes of all layers | ring / halo, predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, length, degree in product(MODELS, LENGTHS, DEGREES):
        spec = load_model(name)
        assert spec.window_tokens is not None, f"{name} has no windows"
        profile = profile_of(spec)
        halo, ring = halo_rows(length, degree, spec.window_tokens), ring_rows(length, degree)
        in_windows = spec.window_layers / (spec.window_layers + spec.ring_layers)
        share = 1 - in_windows + in_windows * halo / ring
        gain = seconds(on_rings(profile, spec), length, degree) / seconds(profile, length, degree)
        print(
            f"| {name} | {spec.window_tokens:,} | {length:,} | {degree} | {halo:,} | {ring:,} | {share:.1%} | "
            f"{gain:.2f}x |",
            flush=True,
        )


def batches_of(profile: CostProfile, drawn: LengthTable, budget: int, sync: Sync) -> GlobalBatches:
    """Return one step of all sequences."""
    problem = Problem(
        num_ranks=RANKS, ranks_per_node=PER_NODE, tokens_per_rank=budget, sync=sync, profile=profile, attention="2d"
    )
    return GlobalBatches(drawn, problem, BatchSettings(global_batch_size=SEQUENCES, shuffle=False))


def gain_of_planning(spec: ModelSpec, budget: int, sync: Sync, family: str, seed: int) -> float:
    """Return what a step takes that was planned for rings, over what one takes that was planned for halos."""
    drawn = LengthTable(name=family, length_tokens=lengths(family, sequences=SEQUENCES, seed=seed))
    profile = profile_of(spec)
    true = batches_of(replace(profile, text=dump_cost_profile(profile)), drawn, budget, sync)
    found = []
    for batches in (batches_of(on_rings(profile, spec), drawn, budget, sync), true):
        assignment = make_solver("fcp", batches).assign(batches.batch(0))
        found.append(assemble(assignment, true.batch(0), true.problem).makespan_seconds)
    return found[0] / found[1]


def print_steps(seeds: int) -> None:
    """Print what planning with halos is worth: geometric mean over families and seeds, and extremes."""
    print("| model | sync | tokens a rank | geometric mean | least | most |")
    print("|---|---|---|---|---|---|")
    for name, sync, budget in product(MODELS, SYNCS, BUDGETS):
        spec = load_model(name)
        gains = [gain_of_planning(spec, budget, sync, *one) for one in product((*FAMILIES, "video"), range(seeds))]
        mean = math.exp(float(np.mean(np.log(gains))))
        print(
            f"| {name} | {sync} | {budget:,} | {mean:.3f} | {min(gains):.3f} | {max(gains):.3f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Sliding windows by halos against windows on the ring.")
    parser.add_argument("--seeds", type=int, default=4)
    seeds = parser.parse_args().seeds
    print_sequences()
    print()
    print_steps(seeds)


if __name__ == "__main__":
    main()
