"""Launches of a micro-batch by counts, and what graphs of a few padded shapes could save.

Run `python -m benchmarks.launches [--seeds 2]`.

First the operations that the host issues for a layer and for the rest of a micro-batch, forward and backward, by the
degree of its ring: counted on the CPU by torch's dispatcher, of a small Qwen3 in bf16 under the runtime's ring, without
those that only make views. Then, from how few tokens a rank on a micro-batch takes the host longer than the device, by
the prices of the computed profile. Last, steps of 512 sequences on 32 ranks: the step predicted with the host's part of
micro-batches and without it (all that graphs could save), the share of micro-batches below that length, the tokens that
padding to shapes in steps of a quarter of an octave adds, and how many graphs the busiest rank would keep: a graph has
its peers and its shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads import FAMILIES, lengths
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.profiling.workload import SilentTransport, Workload, build_model
from fcp_cli.util.arrays import FloatArray

RANKS, PER_NODE, SEQUENCES = 32, 8, 512
SHAPES_PER_OCTAVE = 4
_VIEWS = (
    *("view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("detach", "alias", "split", "split_with_sizes", "as_strided", "unbind", "lift_fresh"),
)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that a device would be given."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += func.overloadpacket.__name__ not in _VIEWS
        return func(*args, **(kwargs or {}))


def operations(layers: int, degree: int) -> int:
    """Count the operations of one micro-batch of a small model, forward and backward, on a member of a ring."""
    small: dict[str, Any] = {
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 96,
        "vocab_size": 64,
    }
    spec, recipe, device = replace(load_model("qwen3-8b"), **small), Recipe(precision="bf16"), torch.device("cpu")
    workload = Workload(build_model(spec, layers, device, recipe), device, recipe, SilentTransport())
    run = workload.microbatch((96 * degree,), range(degree), 0)
    run()
    with _Counting() as counting:  # type: ignore[no-untyped-call]
        run()
    return int(counting.number)


def print_operations() -> None:
    """Print the operations of a layer and of the rest, by degree."""
    print("| ring of | operations of a layer | of the rest of a micro-batch |\n|---|---:|---:|")
    for degree in (1, 2, 3, 4, 8):
        one, three = (operations(layers, degree) for layers in (1, 3))
        layer = (three - one) / 2
        print(f"| {degree} | {layer:.0f} | {one - layer:.0f} |", flush=True)


def without_host(profile: CostProfile) -> CostProfile:
    """Return a profile in which a micro-batch costs the host nothing."""
    profile = replace(profile, coefficients=replace(profile.coefficients, microbatch_seconds=0.0))
    return replace(profile, text=dump_cost_profile(profile))


def tokens_of_rank(step: StepPlan) -> FloatArray:
    """Return [micro-batches] the tokens that a rank of each holds."""
    return np.array([sum(row.lengths) / row.degree for row in step.microbatches() if row.lengths])


def graphs_of_busiest(step: StepPlan) -> int:
    """Return how many distinct pairs of a group and a padded shape a rank has, at most."""
    found: dict[int, set[tuple[tuple[int, ...], int]]] = {}
    for row in step.microbatches():
        if row.lengths:
            shape = int(_shapes(np.array([sum(row.lengths) / row.degree]))[0])
            for rank in row.ranks:
                found.setdefault(rank, set()).add((tuple(row.ranks), shape))
    return max(map(len, found.values()))


def _shapes(tokens: FloatArray) -> FloatArray:
    """Return the lengths to which micro-batches are padded."""
    shapes: FloatArray = np.ceil(2 ** (np.ceil(np.log2(tokens) * SHAPES_PER_OCTAVE) / SHAPES_PER_OCTAVE))
    return shapes


def print_steps(seeds: int) -> None:
    """Print what graphs could save of steps."""
    print("| model | tokens a rank | lengths | host longer below | step without the host | short | padding | graphs |")
    print("|---|---|---|---|---|---|---|---|")
    recipe, cluster = Recipe(precision="bf16", zero_stage=2), load_cluster("h100-8x8")
    for name in ("qwen3-1.7b", "qwen3-8b"):
        profile = analytic_profile(load_model(name), cluster, recipe=recipe, sync="iteration", ranks=RANKS)
        c = profile.coefficients
        least = c.microbatch_seconds / c.linear_seconds_per_token
        for budget in (4_096, 16_384):
            problems = [
                Problem(num_ranks=RANKS, ranks_per_node=PER_NODE, tokens_per_rank=budget, sync="iteration", profile=one)
                for one in (profile, without_host(profile))
            ]
            for family in FAMILIES:
                saved, short, padding, graphs = [], [], [], []
                for seed in range(seeds):
                    drawn = lengths(family, sequences=SEQUENCES, seed=seed)
                    table = LengthTable(name=family, length_tokens=np.minimum(drawn, budget * RANKS))
                    settings = BatchSettings(global_batch_size=SEQUENCES)
                    batches = [GlobalBatches(table, one, settings) for one in problems]
                    assignment = make_solver("fcp", batches[0]).assign(batches[0].batch(0))
                    step, free = (assemble(assignment, one.batch(0), one.problem) for one in batches)
                    saved.append(1 - free.makespan_seconds / step.makespan_seconds)
                    tokens = tokens_of_rank(step)
                    short.append(float((tokens < least).mean()))
                    padding.append(float(_shapes(tokens).sum() / tokens.sum() - 1))
                    graphs.append(graphs_of_busiest(step))
                print(
                    f"| {name} | {budget:,} | {family} | {least:,.0f} tokens | -{np.mean(saved):.1%} | "
                    f"{np.mean(short):.1%} | {np.mean(padding):.1%} | {max(graphs)} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description="Launches of a micro-batch, and what graphs could save.")
    parser.add_argument("--seeds", type=int, default=2)
    seeds = parser.parse_args().seeds
    print_operations()
    print()
    print_steps(seeds)


if __name__ == "__main__":
    main()
