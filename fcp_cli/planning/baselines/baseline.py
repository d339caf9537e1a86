"""Speedup of a plan over the best static plan of the same steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.pricing.packs import planned_sequences, step_prices
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.baselines.static import StaticSolver, best_static
from fcp_cli.planning.batching.batches import batch_of, spread_steps
from fcp_cli.planning.problem import Problem

# Steps compared with the static plan: on real long-tailed data the speedup is within 4 % with 32 steps, 1 % with 256.
_MOST_STEPS = 256


def baseline_steps(steps: int, *, first_step: int = 0) -> list[int]:
    """Return the steps of a plan to compare in `static_speedup`: all, or evenly spaced ones."""
    return [first_step + step for step in spread_steps(steps, _MOST_STEPS)]


def static_speedup(
    steps: Sequence[StepPlan], problem: Problem, *, longest_tokens: int, manifest: LengthTable | None = None
) -> tuple[float, StaticSolver] | None:
    """Return predicted time of the best static plan / predicted time of these steps, and the static solver.

    Args:
        steps: planned steps, all or a sample of a plan.
        problem: the plan's problem.
        longest_tokens: longest sequence of the whole plan, which the static degree must hold.
        manifest: source of `eta` and vision columns.

    Returns:
        None if the recorded times cannot be reproduced, e.g. if they depend on a manifest that was not given.
    """
    if not all(_follows_profile(step, problem, manifest) for step in steps):
        return None
    batches = [batch_of(planned_sequences(step, manifest), problem) for step in steps]
    solver, seconds = best_static(problem, longest_tokens, batches)
    return seconds / sum(step.makespan_seconds for step in steps), solver


def typical_pair(
    steps: Sequence[StepPlan], solver: StaticSolver, *, manifest: LengthTable | None = None
) -> tuple[StepPlan, StepPlan]:
    """Return the step whose speedup over static is nearest to that of all steps, and the same step under static.

    Args:
        steps: planned steps.
        solver: the static solver.
        manifest: source of `eta` and vision columns.
    """
    problem = solver.problem
    batches = [batch_of(planned_sequences(step, manifest), problem) for step in steps]
    answers = [solver.assign(batch) for batch in batches]
    static = np.array([makespan_seconds(*pair, problem) for pair in zip(answers, batches, strict=True)])
    ours = np.array([step.makespan_seconds for step in steps])
    at = int(np.abs(static / ours - static.sum() / ours.sum()).argmin())
    return steps[at], assemble(answers[at], batches[at], problem, steps[at].bound_seconds)


def _follows_profile(step: StepPlan, problem: Problem, manifest: LengthTable | None) -> bool:
    seconds = step_prices(
        step, problem, profile=problem.profile, rank_speeds=problem.rank_speeds, manifest=manifest
    ).seconds
    return bool(np.allclose(seconds, step.seconds, rtol=1e-6))
