"""What the terms of a step change in what is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.workloads import family_table
from fcp_cli.cost.profile import StepTerms, dump_cost_profile, parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.check import check_step
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.fcp_solver import make_solver
from fcp_cli.planning.problem import Problem
from tests.planning.examples import example_problem, one_batch


def with_terms(problem: Problem, terms: StepTerms, **coefficients: float) -> Problem:
    profile = replace(problem.profile, step=terms, coefficients=replace(problem.profile.coefficients, **coefficients))
    return replace(problem, profile=parse_cost_profile(dump_cost_profile(profile), name="x"))


def test_waves_with_a_floor_are_fewer_and_no_slower_than_a_blind_plans() -> None:
    plain = example_problem("microbatch", num_ranks=64, ranks_per_node=8, tokens_per_rank=8192)
    floored = with_terms(plain, StepTerms(wave_floor_seconds=5.0))
    table = family_table("extreme", sequences=512, seed=0)
    batches = one_batch(table, floored)
    batch = batches.batch(0)
    aware, blind = make_solver(batches).assign(batch), make_solver(one_batch(table, plain)).assign(batch)
    assert aware.wave.max() < blind.wave.max()
    step = assemble(aware, batch, floored)
    assert step.makespan_seconds < 0.9 * makespan_seconds(blind, batch, floored)
    assert 0.0 <= step.gap < 0.05


def test_what_closes_a_step_is_shown_and_chooses_nothing() -> None:
    plain = example_problem("iteration")
    closing = with_terms(plain, StepTerms(tail_seconds=2.0, update_seconds=0.5))
    table = family_table("github", sequences=200, seed=0)
    steps = []
    for problem in (plain, closing):
        batches = one_batch(table, problem)
        steps.append(assemble(make_solver(batches).assign(batches.batch(0)), batches.batch(0), problem))
    assert np.array_equal(steps[0].ranks, steps[1].ranks)
    assert np.array_equal(steps[0].sequences, steps[1].sequences)
    assert steps[1].makespan_seconds == steps[0].makespan_seconds + 2.5
    assert steps[1].bound_seconds == pytest.approx(steps[0].bound_seconds + 2.5)


@pytest.mark.parametrize("knows_manifest", [True, False])
def test_a_plan_in_lockstep_is_sound_and_evener_in_what_ranks_wait_for(knows_manifest: bool) -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(500, 4000, 96)
    table = LengthTable(
        name="pictures",
        length_tokens=tokens,
        vision_patches=np.where(generator.random(96) < 0.5, 4 * tokens, 0),
    )
    plain = with_terms(example_problem("microbatch", tokens_per_rank=4096), StepTerms(), vision_seconds_per_patch=1e-4)
    lockstep = with_terms(plain, StepTerms(lockstep=True))
    batches = one_batch(table, lockstep)
    batch = batches.batch(0)
    step = assemble(make_solver(batches).assign(batch), batch, lockstep)
    blind = make_solver(one_batch(table, plain)).assign(batch)
    assert step.bound_seconds <= step.makespan_seconds
    assert step.makespan_seconds < makespan_seconds(blind, batch, lockstep)
    findings = check_step(step, _metadata(lockstep), lockstep.profile, table if knows_manifest else None)
    assert list(findings) == []


def _metadata(problem: Problem) -> PlanMetadata:
    return PlanMetadata(
        fcp_version="0",
        num_ranks=problem.num_ranks,
        ranks_per_node=problem.ranks_per_node,
        sync=problem.sync,
        global_batch_size=96,
        tokens_per_rank=problem.tokens_per_rank,
        seed=0,
        shuffle=False,
        solver="fcp",
        manifest=ManifestReference(name="m", rows=96, content_hash="0"),
        cost_profile=problem.profile.text,
    )
