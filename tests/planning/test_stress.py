"""Answers under stress, and the one that `--robust` chooses."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from benchmarks.workloads import family_table
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp.robust import MOST_LOSS, reversed_order
from fcp_cli.planning.problem import Batch, Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.stress import execution_of, stressed_seconds
from fcp_cli.simulation.effects import step_seconds
from tests.messages import raises
from tests.planning.examples import example_problem


def a_step(sync: Sync) -> tuple[GlobalBatches, Batch, Problem]:
    problem = example_problem(sync, num_ranks=64, ranks_per_node=8)
    table = family_table("github", sequences=512, seed=0)
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=512, shuffle=False))
    return batches, batches.batch(0), problem


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_without_an_effect_a_step_takes_what_was_predicted(sync: Sync) -> None:
    batches, batch, problem = a_step(sync)
    for name in ("fcp", "static"):
        answer = make_solver(name, batches).assign(batch)
        predicted = makespan_seconds(answer, batch, problem)
        assert step_seconds(execution_of(answer, batch, problem)) == pytest.approx(predicted, rel=1e-12)


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_a_robust_step_costs_half_a_per_cent_at_most_and_suffers_less(sync: Sync) -> None:
    batches, batch, problem = a_step(sync)
    plain, robust = (make_solver("fcp", batches, robust=chosen).assign(batch) for chosen in (False, True))
    seconds = [makespan_seconds(answer, batch, problem) for answer in (plain, robust)]
    assert seconds[1] <= seconds[0] * (1 + MOST_LOSS)
    stressed = [stressed_seconds(answer, batch, problem) for answer in (plain, robust)]
    assert sum(stressed[1].values()) <= sum(stressed[0].values())
    if sync == "microbatch":  # its rings across nodes lie apart
        assert stressed[1]["shared link"] < 0.95 * stressed[0]["shared link"]
    assemble(robust, batch, problem)  # whole and legal


def test_the_same_micro_batches_in_reverse_end_no_later() -> None:
    batches, batch, problem = a_step("iteration")
    answer = make_solver("fcp", batches).assign(batch)
    backwards = reversed_order(answer)
    assert makespan_seconds(backwards, batch, problem) <= makespan_seconds(answer, batch, problem) * (1 + 1e-12)
    assert np.array_equal(reversed_order(backwards).members, answer.members)


def test_robust_needs_all_answers_of_fcp() -> None:
    batches = cast(GlobalBatches, None)
    with raises(
        "UsageError: --robust chooses among all answers of --solver fcp, which --max-peers rules out; drop one of the two"
    ):
        make_solver("fcp", batches, robust=True, max_peers=4)
    with raises("UsageError: --robust works with --solver fcp only, not with static"):
        make_solver("static", batches, robust=True)
