"""The planner beside the best of all waves of small steps, with rings alone and with split heads.

    python -m benchmarks.small_steps [--steps 60]

Random steps of seven sequences on two nodes of four ranks, more than what is planned exactly. The best waves are found
by trying every split of the sequences into packs, every number of ranks of each node for each pack, and every number of
ranks that share heads (`plan.pricing.quickest_heads`).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from benchmarks.workloads import example_profile
from fcp_cli.cost.profile import CostProfile, Heads, dump_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import assignment_seconds, makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.util.arrays import FloatArray

_SEQUENCES, _NODES, _PER_NODE, _BUDGET = 7, 2, 4, 8192


def random_profile(generator: np.random.Generator) -> CostProfile:
    """Draw what rings, hops, chunks and exchanges cost, from cheap to dear."""
    profile = example_profile()
    sent = float(generator.choice([4e5, 4e6]))
    coefficients = replace(
        profile.coefficients,
        ring_bytes_per_token=sent,
        last_hop_bytes_per_token=0.4 * sent,
        ring_hop_seconds=float(generator.choice([0.0, 0.02])),
        chunk_seconds_per_token=float(generator.choice([0.0, 1e-5])),
        microbatch_seconds=float(generator.choice([0.01, 0.1])),
    )
    heads = Heads(
        query_heads=8,
        key_value_heads=int(generator.choice([1, 4])),
        exchange_bytes_per_token=sent,
        key_value_exchange_bytes_per_token=0.25 * sent,
        exchange_seconds=float(generator.choice([0.0, 0.02])),
    )
    profile = replace(profile, coefficients=coefficients, heads=heads)
    return replace(profile, text=dump_cost_profile(profile))


def best_waves(batch: Batch, problem: Problem) -> float:
    """Return the least seconds of any waves."""
    everything = (1 << len(batch.rows)) - 1
    seconds = {counts: _seconds_of_all_packs(counts, batch, problem) for counts in _counts(_PER_NODE)}

    @cache
    def wave(todo: int, free: tuple[int, ...]) -> float:
        if not todo:
            return 0.0
        return min(
            (
                max(takes, wave(todo & ~pack, tuple(f - n for f, n in zip(free, counts, strict=True))))
                for counts in seconds
                if all(n <= f for n, f in zip(counts, free, strict=True))
                for pack in _parts(todo)
                if (takes := seconds[counts][pack]) < math.inf
            ),
            default=math.inf,
        )

    @cache
    def waves(todo: int) -> float:
        whole = (_PER_NODE,) * _NODES
        return min((wave(part, whole) + waves(todo & ~part) for part in _parts(todo)), default=0.0)

    return waves(everything)


def _seconds_of_all_packs(counts: tuple[int, ...], batch: Batch, problem: Problem) -> FloatArray:
    """Return [2^n] the seconds of the sequences of each mask on so many ranks of each node; infinite if too long."""
    ranks = [node * _PER_NODE + i for node, count in enumerate(counts) for i in range(count)]
    packs = [[i for i in range(len(batch.rows)) if mask >> i & 1] for mask in range(1, 1 << len(batch.rows))]
    members = np.concatenate(packs)
    row = Assignment(
        wave=np.arange(len(packs), dtype=np.int32),
        rank_offsets=np.arange(len(packs) + 1) * len(ranks),
        ranks=np.tile(np.array(ranks, dtype=np.int32), len(packs)),
        member_offsets=offsets_of([len(pack) for pack in packs]),
        members=members,
    )
    tokens = np.add.reduceat(batch.work.tokens[members], row.member_offsets[:-1])
    fits = tokens <= len(ranks) * problem.tokens_per_rank
    seconds = np.where(fits, assignment_seconds(row, batch, problem), np.inf)
    return np.concatenate(([np.inf], seconds))


def _counts(most: int) -> list[tuple[int, ...]]:
    return [counts for counts in product(range(most + 1), repeat=_NODES) if sum(counts)]


@cache
def _parts(mask: int) -> list[int]:
    """Return the subsets of a mask that hold its lowest bit."""
    parts, part = [], mask
    while part:
        if part & mask & -mask:
            parts.append(part)
        part = (part - 1) & mask
    return parts


def gaps(seed: int) -> tuple[float, float]:
    """Return by how much the plan of a random step takes longer than the best, with rings alone and with both."""
    generator = np.random.default_rng(seed)
    profile = random_profile(generator)
    drawn = np.where(generator.random(_SEQUENCES) < 0.4, generator.uniform(8e3, 4e4, _SEQUENCES), 0.0)
    drawn = np.maximum(drawn, generator.uniform(500, 8e3, _SEQUENCES)).astype(np.int64)
    problem = Problem(
        num_ranks=_NODES * _PER_NODE,
        ranks_per_node=_PER_NODE,
        tokens_per_rank=_BUDGET,
        sync="microbatch",
        profile=profile,
    )
    found = []
    for one in (problem, replace(problem, attention="2d")):
        settings = BatchSettings(global_batch_size=_SEQUENCES, shuffle=False)
        batches = GlobalBatches(LengthTable(name="small", length_tokens=drawn), one, settings)
        batch = batches.batch(0)
        planned = makespan_seconds(make_solver("fcp", batches).assign(batch), batch, one)
        closing = one.profile.step.closing_seconds(one.sync)
        found.append(planned / (best_waves(batch, one) + closing) - 1.0)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    found = 100.0 * np.array([gaps(seed) for seed in range(parser.parse_args().steps)])
    print(f"{'gap to the best waves':24}{'mean':>8}{'median':>8}{'90 %':>8}{'most':>8}{'exact':>7}")
    for name, column in zip(("rings alone", "--attention 2d"), found.T, strict=True):
        shares = f"{column.mean():7.2f}%{np.median(column):7.2f}%{np.quantile(column, 0.9):7.2f}%{column.max():7.2f}%"
        print(f"{name:24}{shares}{100 * np.mean(column < 1e-6):6.0f}%")


if __name__ == "__main__":
    main()
