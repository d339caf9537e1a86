"""Steps whose sequences need rings because a rank holds few tokens, which makes memory, not time, decide the degrees."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workloads import family_table
from fcp_cli.cost.profile import StepTerms, parse_cost_profile
from fcp_cli.planning.assemble import makespan_seconds, step_bound_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from tests.planning.examples import PROFILE, one_batch

# Of Qwen3-8B on H100s without recomputation: a rank holds 7,021 tokens, and attention is longer in a ring.
_COEFFICIENTS = {
    "attention_seconds_per_token2: 6.451e-9": "attention_seconds_per_token2: 1.976e-9",
    "linear_seconds_per_token: 2.838e-4": "linear_seconds_per_token: 9.25e-5",
    "microbatch_seconds: 0.1": "microbatch_seconds: 0.052\n  chunk_seconds_per_token: 2.73e-6\n  last_hop_seconds: 0.0072",
    "ring_hop_seconds: 0.001": "ring_hop_seconds: 0.0072",
}


def _problem(num_ranks: int) -> Problem:
    text = PROFILE
    for old, new in _COEFFICIENTS.items():
        assert old in text
        text = text.replace(old, new)
    profile = replace(parse_cost_profile(text, name="small budgets"), step=StepTerms(wave_floor_seconds=0.18))
    return Problem(num_ranks=num_ranks, ranks_per_node=8, tokens_per_rank=7021, sync="microbatch", profile=profile)


def test_the_bound_counts_what_rings_add_to_sequences_that_no_rank_holds() -> None:
    problem = _problem(16)
    batches = one_batch([21_000] * 64, problem)
    batch = batches.batch(0)
    in_rings_of_three = batch.work.total_seconds.sum() + 2 * 2.73e-6 * 21_000 * 64
    assert step_bound_seconds(batch, problem) >= in_rings_of_three / 16


def test_clips_that_need_rings_of_two_to_five_run_no_slower_than_bytescale_runs_them() -> None:
    problem = _problem(64)
    table = family_table("video", sequences=512, seed=0)
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=512, shuffle=False))
    batch = batches.batch(0)
    ours, theirs = (
        makespan_seconds(make_solver(name, batches).assign(batch), batch, problem) for name in ("fcp", "bytescale")
    )
    assert ours < theirs
    assert ours < 1.08 * step_bound_seconds(batch, problem)
