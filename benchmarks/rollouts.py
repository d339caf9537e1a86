"""verl's and slime's own balancing beside fcp on lengths of rollouts: `python -m benchmarks.rollouts`.

What is installed of the two runs, and what fcp answers at the same call site, beside it; then fcp on its own, without
rings and with them. verl: `get_seqlen_balanced_partitions` spreads a global batch over data-parallel ranks, as its
trainer calls it, and `rearrange_micro_batches` cuts what a rank got into micro-batches. slime: `build_dp_schedule` with
`--balance-data` and dynamic micro-batches. fcp has the token budget of both. Seconds are those of the example cost
profile, for all alike; with `--phase forward`, those of its forward passes.
"""

from __future__ import annotations

import argparse
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np

from benchmarks.workloads import EXAMPLE_PROFILE
from fcp_cli import Planner
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.problem import Assignment
from fcp_cli.planning.rollouts.slime import build_dp_schedule
from fcp_cli.planning.rollouts.verl import VerlBalancing
from fcp_cli.util.arrays import IntArray

Packs: TypeAlias = list[list[list[int]]]  # of each rank, positions in the batch

# Qwen3-8B, as slime's arguments name its figures.
_MODEL: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 12288,
    "num_layers": 36,
    "vocab_size": 151936,
    "num_experts": None,
}


def rollout_lengths(sequences: int, longest: int, seed: int) -> IntArray:
    """Lengths like those of a reasoning model's answers: a lognormal body, and one in ten cut off at the limit."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(np.log(2500), 0.9, sequences)
    drawn[generator.random(sequences) < 0.1] = longest
    return drawn.clip(64, longest).astype(np.int64)


def with_verls_functions(functions: Any, workloads: Any, planner: Planner, lengths: IntArray) -> Packs:
    """Return the packs of each rank by functions of verl's names."""
    import torch
    from tensordict import TensorDict  # type: ignore[import-not-found, unused-ignore]

    ranks, tokens = planner.problem.num_ranks, planner.problem.tokens_per_rank
    work = workloads(torch.from_numpy(lengths)).tolist()
    found = []
    for mine in functions.get_seqlen_balanced_partitions(work, ranks, equal_size=True):
        rows = [torch.zeros(int(lengths[position]), dtype=torch.int8) for position in mine]
        batch = TensorDict(
            {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(mine)
        )
        packs = functions.rearrange_micro_batches(batch, tokens)[1]
        found.append([[mine[i] for i in pack] for pack in packs])
    return found


def with_slimes_function(function: Callable[..., Any], planner: Planner, lengths: IntArray) -> Packs:
    """Return the packs of each rank by a function of slime's name."""
    problem, count = planner.problem, len(lengths)
    samples, packs, _, _ = function(
        Namespace(
            max_tokens_per_gpu=problem.tokens_per_rank,
            use_dynamic_batch_size=True,
            balance_data=True,
            balance_by_flops=False,
            **_MODEL,
        ),
        {"dp_size": problem.num_ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1},
        lengths.tolist(),
        global_batch_size=count,
        rollout_indices=list(range(count)),
    )
    return [[[mine[at] for at in pack] for pack in its_packs] for mine, its_packs in zip(samples, packs, strict=True)]


def seconds_of(packs_by_rank: Packs, lengths: IntArray, planner: Planner) -> float:
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


def contenders(with_rings: Planner, without: Planner) -> Iterator[tuple[str, Callable[[IntArray], float]]]:
    """Yield names, and what takes the lengths of a batch to predicted seconds; only what is installed."""

    def spread(split: Callable[[IntArray], Packs]) -> Callable[[IntArray], float]:
        return lambda lengths: seconds_of(split(lengths), lengths, without)

    if verl := _installed("verl.utils.seqlen_balancing"):
        workloads = verl.calculate_workload
        yield "verl", spread(partial(with_verls_functions, verl, workloads, without))
        yield "fcp for verl", spread(partial(with_verls_functions, VerlBalancing(without), workloads, without))
    if slime := _installed("slime.utils.dp_schedule"):
        yield "slime", spread(partial(with_slimes_function, slime.build_dp_schedule, without))
    yield "fcp for slime", spread(partial(with_slimes_function, partial(build_dp_schedule, without), without))
    yield "fcp, max_degree=1", lambda lengths: without.plan(lengths).makespan_seconds
    yield "fcp", lambda lengths: with_rings.plan(lengths).makespan_seconds


def _installed(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        print(f"{module} is left out: {error}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens-per-rank", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--phase", choices=("training", "forward"), default="training")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(EXAMPLE_PROFILE)
        given: dict[str, Any] = {
            "ranks": options.ranks,
            "ranks_per_node": 8,
            "tokens_per_rank": options.tokens_per_rank,
            "sync": "iteration",
            "phase": options.phase,
        }
        named = dict(contenders(Planner(profile, **given), Planner(profile, **given, max_degree=1)))
        batches = [rollout_lengths(options.sequences, options.tokens_per_rank, seed) for seed in range(options.steps)]
        print(
            f"{options.ranks} ranks, {options.sequences} sequences a step, {options.phase}, predicted seconds, mean of "
            f"{options.steps} steps"
        )
        for name, seconds in named.items():
            print(f"{name:18} {statistics.fmean(map(seconds, batches)):7.2f}")


if __name__ == "__main__":
    main()
