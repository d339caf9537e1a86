"""Problems and length tables that the planning tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.compare_families import profile_with_heads
from benchmarks.workloads import EXAMPLE_PROFILE
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp_solver import make_solver
from fcp_cli.planning.make_plan import plan_step
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import SolverFactory

# The benchmarks' example, with a cost per hop, so that no test is blind to that term.
PROFILE = EXAMPLE_PROFILE.replace("ring_hop_seconds: 0.0", "ring_hop_seconds: 0.001")


def example_profile() -> CostProfile:
    return parse_cost_profile(PROFILE, name="example")


def example_problem(
    sync: Sync = "iteration",
    *,
    num_ranks: int = 16,
    ranks_per_node: int = 4,
    tokens_per_rank: int = 16384,
    padding_multiple: int | None = None,
) -> Problem:
    return Problem(
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        tokens_per_rank=tokens_per_rank,
        padding_multiple=padding_multiple,
        sync=sync,
        profile=example_profile(),
    )


def problem_with_heads(num_ranks: int, tokens_per_rank: int = 8192) -> Problem:
    profile = profile_with_heads()
    return Problem(
        num_ranks=num_ranks, ranks_per_node=8, tokens_per_rank=tokens_per_rank, sync="iteration", profile=profile
    )


def table_of(lengths: Sequence[int]) -> LengthTable:
    return LengthTable(name="lengths.parquet", length_tokens=np.array(lengths, dtype=np.int64))


def long_tail(sequences: int = 200) -> LengthTable:
    """Short sequences and a few of up to 100k tokens."""
    generator = np.random.default_rng(0)
    short = generator.lognormal(7.0, 1.2, sequences).astype(np.int64)
    return table_of([*np.clip(short, 1, 16_000).tolist(), 30_000, 55_555, 100_000])


def one_batch(rows: LengthTable | Sequence[int], problem: Problem) -> GlobalBatches:
    """All the sequences in one step, in their order."""
    table = rows if isinstance(rows, LengthTable) else table_of(rows)
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table), shuffle=False))


def first_step(batches: GlobalBatches, make: SolverFactory = make_solver) -> StepPlan:
    """As a solver plans it; assembling it checks coverage, budgets, ranks and waves."""
    return plan_step(batches.batch(0), batches.problem, make(batches))


def four_steps(
    sync: Sync, *, num_ranks: int, seed: int = 5, ranks_per_node: int = 4, most_tokens: int | None = None
) -> GlobalBatches:
    """Short sequences and a long tail, up to what all ranks hold together, for ranks that hold 4,096 tokens."""
    drawn = 500 * (np.random.default_rng(seed).pareto(1.0, 400) + 1)
    return GlobalBatches(
        table_of(drawn.clip(1, most_tokens or 4096 * num_ranks).astype(np.int64).tolist()),
        example_problem(sync, num_ranks=num_ranks, ranks_per_node=ranks_per_node, tokens_per_rank=4096),
        BatchSettings(global_batch_size=100),
    )


def compile_planner() -> None:
    """Plan a small step under each sync, after which every kernel of the planner is compiled on disk."""
    syncs: tuple[Sync, ...] = ("iteration", "microbatch")
    for sync in syncs:
        problem = example_problem(sync, padding_multiple=4)
        first_step(GlobalBatches(long_tail(60), problem, BatchSettings(global_batch_size=63)))
