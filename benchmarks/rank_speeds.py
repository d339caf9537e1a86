"""Steps on ranks of different speeds, with and without the planner knowing: `python -m benchmarks.rank_speeds`.

Seconds are predicted by the cost model; milliseconds are those of planning on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.workloads import MAX_LENGTH, example_profile, family_table
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.fcp_solver import solver_of
from fcp_cli.planning.problem import Problem

SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")
# ranks, sequences, and who is slow
CASES: Mapping[str, tuple[int, int, Mapping[int, float]]] = {
    "64 ranks, one at 0.7": (64, 512, {5: 0.7}),
    "64 ranks, a node at 0.8": (64, 512, dict.fromkeys(range(8, 16), 0.8)),
    "8 ranks, one at 0.7": (8, 64, {3: 0.7}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="github")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    print(f"{arguments.family}, sequences of up to {MAX_LENGTH}, mean of {arguments.steps} steps, s")
    print("case | sync | equal ranks | slow, not known | slow, known | bound | ms per plan")
    for name, (ranks, sequences, slow) in CASES.items():
        for sync in SYNCS:
            problem = Problem(
                num_ranks=ranks, ranks_per_node=8, tokens_per_rank=16_384, sync=sync, profile=example_profile()
            )
            real = replace(problem, rank_speeds=tuple(slow.get(rank, 1.0) for rank in range(ranks)))
            rows = [_row(problem, real, arguments.family, sequences, seed) for seed in range(arguments.steps)]
            print(" | ".join([name, sync, *(f"{value:.2f}" for value in np.mean(rows, axis=0))]))


def _row(problem: Problem, real: Problem, family: str, sequences: int, seed: int) -> list[float]:
    batch = batch_of(family_table(family, sequences=sequences, seed=seed), problem)
    even = solver_of(problem).assign(batch)
    started = time.process_time()
    known = solver_of(real).assign(batch)
    milliseconds = 1e3 * (time.process_time() - started)
    step = assemble(known, batch, real)
    blind = assemble(even, batch, real).makespan_seconds
    alike = assemble(even, batch, problem).makespan_seconds
    return [alike, blind, step.makespan_seconds, step.bound_seconds, milliseconds]


if __name__ == "__main__":
    main()
