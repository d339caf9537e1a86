"""Coefficients and speeds of ranks follow what micro-batches took, within bounds, whatever single ones took."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest

from fcp_cli.cost.recipe import SplitAttention
from fcp_cli.plan.metadata import Factors, ScheduledRefit, refitted
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.fcp_solver import solver_of
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.refitting import Refitter
from tests.planning.examples import example_problem, problem_with_heads, table_of

RANKS = 8
PROBLEM = example_problem(num_ranks=RANKS)


def measured(
    truth: ScheduledRefit, *, problem: Problem = PROBLEM, steps: int = 6, noise: float = 0.02, outliers: float = 0.05
) -> tuple[Refitter, pa.Table]:
    """Return a refitter that knows some steps, and what these took under other factors and speeds."""
    generator = np.random.default_rng(0)
    refitter = Refitter(problem)
    speeds = tuple(truth.rank_speeds.get(str(rank), 1.0) for rank in range(RANKS))
    real = replace(problem, profile=refitted(problem.profile, truth), rank_speeds=speeds)
    rows = []
    for number in range(steps):
        table = table_of(np.clip(generator.lognormal(7.0, 1.2, 64), 16, 30_000).astype(int).tolist())
        batch = batch_of(table, problem, step=number)
        answer = solver_of(problem).assign(batch)
        step = assemble(answer, batch, problem)
        took = assemble(answer, batch_of(table, real), real).seconds
        refitter.keep(step, table.take(step.sequences))
        for row in step.microbatches():
            seconds = took[row.order] * generator.normal(1.0, noise) * (3.0 if generator.random() < outliers else 1.0)
            rows += [(number, row.order, rank, seconds) for rank in row.ranks if not row.is_idle]
    columns = zip(("step", "order", "rank", "seconds"), zip(*rows, strict=True), strict=True)
    return refitter, pa.table({name: list(column) for name, column in columns})


def test_factors_and_a_slow_rank_are_found_together_through_noise_and_outliers() -> None:
    truth = ScheduledRefit(first_step=0, factors=Factors(linear=1.4, attention=0.8), rank_speeds={"3": 0.7})
    refitter, table = measured(truth)
    found, line = refitter.refit(20, table, None)
    assert found is not None and found.first_step == 20
    assert found.rank_speeds == {"3": pytest.approx(0.7, abs=0.02)}
    assert found.factors.linear == pytest.approx(1.4, rel=0.05)
    assert found.factors.attention == pytest.approx(0.8, rel=0.1)
    assert line.startswith(
        f"{len(set(zip(*(table.column(name).to_pylist() for name in ('step', 'order')), strict=True)))} micro-batches of 6 steps: "
    )
    assert "rank 3 at 0.7" in line


@pytest.mark.parametrize("attention", [None, "2d"])
def test_steps_that_take_what_was_planned_change_nothing_whatever_the_ring_consists_of(
    attention: SplitAttention | None,
) -> None:
    problem = replace(problem_with_heads(RANKS), attention=attention)
    coefficients, ring_bytes = problem.profile.coefficients, 20 * problem.profile.coefficients.ring_bytes_per_token
    long_ring = {"ring_bytes_per_token": ring_bytes, "last_hop_bytes_per_token": 0.9 * ring_bytes}
    profile = replace(problem.profile, coefficients=replace(coefficients, **long_ring))
    as_planned = ScheduledRefit(first_step=0)
    refitter, table = measured(as_planned, problem=replace(problem, profile=profile), noise=0.0, outliers=0.0)
    found, line = refitter.refit(20, table, None)
    assert found is None, line


def test_a_rank_that_is_slow_in_one_step_only_is_not_persistently_slow() -> None:
    refitter, table = measured(ScheduledRefit(first_step=0))
    rows = table.to_pylist()
    for row in rows:
        row["seconds"] *= 2.0 if row["rank"] == 3 and row["step"] == 2 else 1.0
    found, line = refitter.refit(20, pa.Table.from_pylist(rows), None)
    assert found is None and line.endswith(" micro-batches of 6 steps are as planned")


def test_a_rank_that_has_recovered_is_as_fast_as_the_others_again() -> None:
    refitter, table = measured(ScheduledRefit(first_step=0))
    found, _line = refitter.refit(20, table, ScheduledRefit(first_step=10, rank_speeds={"3": 0.7}))
    assert found is not None and found.rank_speeds == {}


def test_one_refit_changes_a_factor_twofold_at_most() -> None:
    truth = ScheduledRefit(first_step=0, factors=Factors(microbatch=8.0, linear=8.0, attention=8.0, ring=8.0))
    refitter, table = measured(truth)
    found, _line = refitter.refit(20, table, None)
    assert found is not None
    assert max(asdict(found.factors).values()) == 2.0


def test_micro_batches_that_wait_for_a_slow_host_make_the_fixed_seconds_of_both_clocks_dearer() -> None:
    host = {"microbatch_seconds": 0.1, "host_microbatch_seconds": 2.0, "host_hop_seconds": 0.5}
    profile = replace(PROBLEM.profile, coefficients=replace(PROBLEM.profile.coefficients, **host))
    truth = ScheduledRefit(first_step=0, factors=Factors(microbatch=1.5))
    refitter, table = measured(truth, problem=replace(PROBLEM, profile=profile))
    found, _line = refitter.refit(20, table, None)
    assert found is not None
    assert asdict(found.factors) == pytest.approx({**asdict(Factors()), "microbatch": 1.5}, rel=0.1)


def test_too_few_micro_batches_change_nothing() -> None:
    refitter, table = measured(ScheduledRefit(first_step=0, factors=Factors(linear=2.0)))
    assert refitter.refit(20, table.slice(0, 0), None) == (None, "0 micro-batches were measured, too few to refit")
