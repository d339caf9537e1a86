"""Global batches of Megatron-Bridge's packed fine-tuning, run in packs, by its dynamic CP and by fcp.

    python -m benchmarks.bridge_packs --manifests wlb_llm_lengths.parquet linux_source.parquet

Its loader of whole batches (`dataloader_type="batch"`) gives rows that were packed in advance, first-fit in random
order, up to as many tokens as the longest sequence may have. Three ways to run the same rows, Qwen3-8B on 64 ranks:

    packs       a row is a micro-batch on the one degree that holds it; rows go to data-parallel ranks in turn
    dynamic CP  rows are taken apart again (its `prepare_dynamic_cp_batch`), and `DefaultDynamicCPScheduler` of
                megatron-core's development branch places their sequences: at the budget alone as Bridge gives it, and
                at the quickest of the budget and its half, quarter and eighth (`megatron-packing`)
    fcp         plans the same sequences

Padding of rows to one width, and of sequences to twice the degree, is priced nowhere. Seconds of a step, and the times
of fcp's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.real_lengths import PUBLISHED, drawn
from benchmarks.split_heads import profile_of
from benchmarks.workloads import FAMILIES
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.drafts import Draft, assignment_of, first_fit
from fcp_cli.planning.problem import Assignment, Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.strategies.megatron_dynamic_cp import drafts_of
from fcp_cli.planning.strategies.megatron_packing import packed_rounds
from fcp_cli.util.arrays import IntArray

RANKS = 64


def global_batch(lengths: IntArray, *, pack: int, rows: int, seed: int) -> tuple[IntArray, list[list[int]]]:
    """Return the lengths of the sequences of a batch of rows, and which of them each row has."""
    generator = np.random.default_rng(seed)
    kept = generator.permutation(lengths[lengths <= pack])
    row_of = first_fit(kept, pack)
    packed = int(row_of.max()) + 1
    if packed < rows:
        raise SystemExit(f"{len(kept)} sequences fill {packed} rows of {pack} tokens; give more --sequences")
    chosen = [np.flatnonzero(row_of == row) for row in generator.permutation(packed)[:rows]]
    ends = np.cumsum([0, *map(len, chosen)])
    members = [list(range(start, stop)) for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    return kept[np.concatenate(chosen)], members


def in_turn(rows: Sequence[Sequence[int]], degree: int, sync: Sync) -> Assignment:
    """Deal rows to the groups of one degree."""
    groups = RANKS // degree
    firsts = [number % groups * degree for number in range(len(rows))]
    return assignment_of([Draft(range(f, f + degree), row) for f, row in zip(firsts, rows, strict=True)], sync)


def seconds(tokens: IntArray, rows: Sequence[Sequence[int]], problem: Problem, degree: int) -> list[float]:
    """Return the seconds of a step in packs, by dynamic CP as given and tuned, and by fcp."""
    settings = BatchSettings(global_batch_size=len(tokens), shuffle=False)
    batches = GlobalBatches(LengthTable(name="rows", length_tokens=tokens), problem, settings)
    batch = batches.batch(0)
    assert np.array_equal(batch.lengths, tokens)
    rounds = packed_rounds(tokens.tolist(), max_tokens_per_rank=problem.tokens_per_rank, num_ranks=RANKS)
    found = [
        in_turn(rows, degree, problem.sync),
        assignment_of(list(drafts_of(rounds, lambda group: [group.sequences])), problem.sync),
        *(make_solver(name, batches).assign(batch) for name in ("megatron-packing", "fcp")),
    ]
    return [makespan_seconds(one, batch, problem) for one in found]


def main() -> None:
    """Print one row per set of lengths and sync."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifests", type=Path, nargs="*", default=[], help="Parquet files with a column length")
    parser.add_argument("--cluster", default="h100-8x8")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens per rank")
    parser.add_argument("--degree", type=int, default=8, help="ranks that run a row")
    parser.add_argument("--rows", type=int, default=32, help="rows of a global batch")
    parser.add_argument("--sequences", type=int, default=4096, help="sequences of the data set that is packed")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    manifests = {path.stem: path for path in options.manifests}
    profile = profile_of("qwen3-8b", options.cluster)
    print("| lengths | sync | packs | dynamic CP | tuned | fcp |\n|---|---|---:|---:|---:|---:|")
    for name in [*FAMILIES, *manifests, *PUBLISHED]:
        lengths = drawn(name, sequences=options.sequences, manifests=manifests)
        of_seeds = [
            global_batch(lengths, pack=options.degree * options.budget, rows=options.rows, seed=seed)
            for seed in range(options.seeds)
        ]
        for sync in ("microbatch", "iteration"):
            problem = Problem(
                num_ranks=RANKS, ranks_per_node=8, tokens_per_rank=options.budget, sync=sync, profile=profile
            )
            each = np.array([seconds(tokens, rows, problem, options.degree) for tokens, rows in of_seeds])
            *others, fcp = each.mean(axis=0).tolist()
            cells = " | ".join(f"{one:.2f} s, {one / fcp:.2f}x" for one in others)
            print(f"| {name} | `{sync}` | {cells} | {fcp:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
