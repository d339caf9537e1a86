"""verl's own balancing beside fcp on the same global batches: `python -m benchmarks.verl`, where verl is installed.

Two call sites: `get_seqlen_balanced_partitions` spreads a global batch over data-parallel ranks, as verl's trainer
calls it, and `rearrange_micro_batches` cuts what a rank got into micro-batches. Both are verl's functions as installed;
fcp has the token budget of their `max_token_len`. Seconds are those of the example cost profile, for all alike.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict  # type: ignore[import-not-found, unused-ignore]
from verl.utils import seqlen_balancing  # type: ignore[import-not-found, unused-ignore]

from benchmarks.workloads import EXAMPLE_PROFILE
from fcp_cli import Planner
from fcp_cli.arrays import IntArray
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.problem import Assignment


def rollout_lengths(sequences: int, longest: int, seed: int) -> IntArray:
    """Lengths like those of a reasoning model's answers: a lognormal body, and one in ten cut off at the limit."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(2500), 0.9, sequences)
    drawn[generator.random(sequences) < 0.1] = longest
    return drawn.clip(64, longest).astype(np.int64)


def partitions_of_verl(lengths: IntArray, ranks: int, tokens_per_rank: int) -> list[list[list[int]]]:
    """Return verl's micro-batches of every rank: positions in `lengths`."""
    work = seqlen_balancing.calculate_workload(torch.from_numpy(lengths)).tolist()
    found = []
    for mine in seqlen_balancing.get_seqlen_balanced_partitions(work, ranks, equal_size=True):
        rows = [torch.zeros(int(lengths[position]), dtype=torch.int8) for position in mine]
        batch = TensorDict(
            {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(mine)
        )
        packs = seqlen_balancing.rearrange_micro_batches(batch, tokens_per_rank)[1]
        found.append([[mine[i] for i in pack] for pack in packs])
    return found


def seconds_of(packs_by_rank: list[list[list[int]]], lengths: IntArray, planner: Planner) -> float:
    """Predict the step time of packs that each run on one rank."""
    packs = [(rank, pack) for rank, its_packs in enumerate(packs_by_rank) for pack in its_packs]
    batch = batch_of(LengthTable(name="lengths", length_tokens=lengths), planner.problem)
    assignment = Assignment(
        wave=np.full(len(packs), -1, dtype=np.int32),
        rank_offsets=np.arange(len(packs) + 1),
        ranks=np.array([rank for rank, _ in packs], dtype=np.int32),
        member_offsets=offsets_of([len(pack) for _, pack in packs]),
        members=np.array([position for _, pack in packs for position in pack], dtype=np.int64),
    )
    return assemble(assignment, batch, planner.problem).makespan_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens-per-rank", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(EXAMPLE_PROFILE)
        given: dict[str, Any] = {
            "ranks": options.ranks,
            "ranks_per_node": 8,
            "tokens_per_rank": options.tokens_per_rank,
            "sync": "iteration",
        }
        without_rings = Planner(profile, **given, max_degree=1)
        with_rings = Planner(profile, **given)
        rows = []
        for seed in range(options.steps):
            lengths = rollout_lengths(options.sequences, options.tokens_per_rank, seed)
            verl = seconds_of(
                partitions_of_verl(lengths, options.ranks, options.tokens_per_rank), lengths, without_rings
            )
            rows.append((verl, *(it.plan(lengths).makespan_seconds for it in (without_rings, with_rings))))
    print(
        f"{options.ranks} ranks, {options.sequences} sequences a step, mean of {options.steps} steps, predicted seconds"
    )
    for name, seconds in zip(("verl", "fcp, max_degree=1", "fcp"), zip(*rows, strict=True), strict=True):
        print(f"{name:18} {statistics.fmean(seconds):7.2f}")


if __name__ == "__main__":
    main()
