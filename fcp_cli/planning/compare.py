"""Comparison of strategies on the same batches and cost profile: step time, gap, idle time, groups, planning time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np

from fcp_cli.cost.recipe import check_recipe
from fcp_cli.errors import FcpError, UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.setup import held_tokens
from fcp_cli.plan.summary import PlanSummary
from fcp_cli.planning.assemble import StuckError, assemble, step_bound_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, SampledBatches
from fcp_cli.planning.padded import Padded
from fcp_cli.planning.problem import Assignment, Batch, PricedStep, Problem, StepPricer
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.planning.solvers import DEFAULT, make_solver, strategy

SYNCS: tuple[Sync, ...] = ("microbatch", "iteration")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of a strategy under one sync, over all compared steps.

    Attributes:
        options: options of the strategy, given or tuned by itself.
        step_seconds: mean predicted step time.
        gap: sum of step times / sum of lower bounds - 1.
        idle_fraction: share of rank-seconds in which ranks wait.
        distinct_groups: groups of degree > 1 over all steps.
        over_budget: micro-batches with more tokens than their ranks may hold; 0 for a `StepPricer`.
        setup_seconds: tuning ahead of the first step.
        planning_seconds: median over the steps; one or two steps include the compilation of the first call.
        seconds: predicted time of each step.
        recipe: recipe that it was planned under, or None if the profile names none.
    """

    sync: Sync
    options: dict[str, Any]
    step_seconds: float
    gap: float
    idle_fraction: float
    distinct_groups: int
    over_budget: int
    setup_seconds: float
    planning_seconds: float
    seconds: tuple[float, ...] = ()
    recipe: str | None = None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: outcomes within the token budget first, then the fastest."""
        return self.over_budget > 0, self.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One strategy.

    Attributes:
        name: the name of the strategy.
        outcomes: outcome per sync, except those in which pipelines would deadlock; empty if the strategy was refused.
        refusal: why there are no outcomes, or "".
    """

    name: str
    outcomes: dict[Sync, Outcome] = field(default_factory=dict)
    refusal: str = ""

    @property
    def best(self) -> Outcome | None:
        """The outcome under the fastest sync; on ties that of `iteration`, the usual default."""
        return min(
            self.outcomes.values(),
            key=lambda outcome: (outcome.step_seconds, outcome.sync != "iteration"),
            default=None,
        )


def compare(
    table: LengthTable,
    problem: Problem,
    settings: BatchSettings,
    *,
    names: Sequence[str],
    syncs: Sequence[Sync] = SYNCS,
    milp_seconds: float,
    on_step: Callable[[str], None] | None = None,
) -> Iterator[Contender]:
    """Plan the same steps with each strategy and yield its result.

    Args:
        table: lengths of the manifest.
        problem: ranks, token budget and cost profile; its sync is ignored.
        settings: batch settings, including `step_limit`.
        names: solver names.
        syncs: syncs to plan for with each strategy.
        milp_seconds: time limit of each of FlexSP's integer programs.
        on_step: callback with the strategy's name after each planned step.
    """
    for name in names:
        # A strategy that ignores sync plans once for all syncs.
        sync_groups = [[sync] for sync in syncs] if strategy(name).knows_sync else [syncs]
        outcomes: dict[Sync, Outcome] = {}
        refusal = ""
        for group in sync_groups:
            attention = problem.attention if name == DEFAULT else strategy(name).attention
            own_problem = replace(colocated(problem), sync=group[0], attention=attention)
            batches = GlobalBatches(table, own_problem, settings)
            try:
                outcomes |= _run(name, batches, group, milp_seconds=milp_seconds, on_step=on_step)
            except StuckError as error:  # the other sync may work
                refusal = refusal or str(error)
            except FcpError as error:
                outcomes, refusal = {}, str(error)
                break
        yield Contender(name=name, outcomes=outcomes, refusal="" if outcomes else refusal)


USABLE: Final = ("static", "deepspeed-ulysses", "usp", "megatron-dynamic-cp", "packing", "padded")
"""Strategies that a user can choose today instead of a plan; the others are rows of a table, not advice."""
_PLANNED_WHOLE: Final = 3  # recipes of a strategy and sync


def compare_recipes(
    inputs: PlanInputs,
    steps: Sequence[int],
    *,
    names: Sequence[str],
    syncs: Sequence[Sync],
    milp_seconds: float | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Iterator[Contender]:
    """Plan the same steps with each strategy under the recipe that suits it best for each sync, and yield its result.

    A recipe that cannot run under a sync is not priced under it. Of strategies in `USABLE`, all recipes are drafted on
    one step and the best three planned; others get the three that are quickest for fcp, or one if they take minutes.

    Args:
        inputs: inputs of the plan; fcp keeps the plan's problem under the plan's sync.
        steps: numbers of the batches to plan.
        names, syncs, milp_seconds: see `compare`.
        on_step: callback with the strategy's name after each strategy and sync.
    """
    problems = runnable_problems(inputs)
    for name in names:
        outcomes: dict[Sync, Outcome] = {}
        refusal, attention = "", inputs.problem.attention if name == DEFAULT else strategy(name).attention
        for sync in syncs:
            own = [replace(colocated(one), attention=attention) for one in problems if one.sync == sync]
            if (name == DEFAULT and sync == inputs.problem.sync) or not strategy(name).is_quick:
                own = own[:1]
            attempt = partial(_attempt, name, inputs, milp_seconds=milp_seconds)
            if name not in USABLE:
                own = own[:_PLANNED_WHOLE]
            elif len(own) > 1:
                drafts = [(draft, one) for one in own if isinstance(draft := attempt(one, steps[:1]), Outcome)]
                drafts.sort(key=lambda draft: draft[0].rank)
                own = [one for _, one in drafts[:_PLANNED_WHOLE]] or own[:1]
            for found in (attempt(one, steps) for one in own):
                if isinstance(found, str):
                    refusal = refusal or found
                elif sync not in outcomes or found.rank < outcomes[sync].rank:
                    outcomes[sync] = found
            if on_step is not None:
                on_step(name)
        yield Contender(name=name, outcomes=outcomes, refusal="" if outcomes else refusal)


def runnable_problems(inputs: PlanInputs) -> list[Problem]:
    """Return the plan's problem, and those of other recipes and syncs that can run, which may suit a rival better."""
    problem, budget = inputs.problem, inputs.budget
    others: Sequence[Problem] = () if budget is None or problem.phase is not None else budget.for_rivals
    found = [problem, *(replace(other, rank_speeds=problem.rank_speeds) for other in others)]
    if not others and problem.virtual_stages == 1:
        for sync in SYNCS:
            with suppress(UsageError):
                if problem.recipe is not None:
                    check_recipe(problem.recipe, sync=sync)
                found.append(replace(problem, sync=sync))
    return [one for k, one in enumerate(found) if one not in found[:k]]


def _attempt(
    name: str, inputs: PlanInputs, problem: Problem, steps: Sequence[int], *, milp_seconds: float | None
) -> Outcome | str:
    """Return the outcome of a strategy under one recipe, or why it has none."""
    try:
        batches = SampledBatches(replace(inputs, problem=problem).batches(), steps)
        return _run(name, batches, [problem.sync], milp_seconds=milp_seconds)[problem.sync]
    except FcpError as error:
        return str(error)


def colocated(problem: Problem) -> Problem:
    """Return the problem with encoder and language model on all ranks, and images encoded by their own group."""
    return replace(problem, num_ranks=problem.all_ranks, encoder_balance=None, encoder_ranks=None)


def encoder_placements(inputs: PlanInputs, steps: Sequence[int]) -> Iterator[Contender]:
    """Yield the results of fcp with the requested encoder placements; nothing if groups encode their own images."""
    problem = inputs.problem
    if problem.encoder_balance is None:
        return
    placements = {"fcp over the wave": replace(colocated(problem), encoder_balance="wave")}
    if problem.encoder_ranks is not None:
        placements[f"fcp, {problem.encoder_ranks} encode"] = problem
    for name, placed in placements.items():
        batches = SampledBatches(replace(inputs, problem=placed).batches(), steps)
        yield Contender(name=name, outcomes=_run(DEFAULT, batches, ["microbatch"]))


def _run(
    name: str,
    batches: GlobalBatches,
    syncs: Sequence[Sync],
    *,
    milp_seconds: float | None = None,
    on_step: Callable[[str], None] | None = None,
) -> dict[Sync, Outcome]:
    """Plan all batches under the first of `syncs`, and price the same micro-batches under each of them."""
    started = time.perf_counter()
    options = {"milp_seconds": milp_seconds} if "milp_seconds" in strategy(name).options else {}
    solver = make_solver(name, batches, **options)
    setup_seconds = time.perf_counter() - started
    tallies = {sync: _Tally(replace(batches.problem, sync=sync)) for sync in syncs}
    planning_seconds = []
    for batch in batches:
        started = time.perf_counter()
        answer = solver.price(batch) if isinstance(solver, StepPricer) else solver.assign(batch)
        planning_seconds.append(time.perf_counter() - started)
        batch_as_run = solver.padded(batch) if isinstance(solver, Padded) else batch
        for tally in tallies.values():
            if isinstance(answer, PricedStep):
                tally.add_priced(answer)
            else:
                tally.add(answer, batch, batch_as_run)
            if on_step is not None:
                on_step(name)
    return {
        sync: Outcome(
            sync=sync,
            options=dict(solver.options),
            step_seconds=tally.summary.mean_step_seconds,
            gap=tally.summary.gap,
            idle_fraction=tally.summary.idle_fraction,
            distinct_groups=len(tally.groups),
            over_budget=tally.over_budget,
            setup_seconds=setup_seconds,
            planning_seconds=statistics.median(planning_seconds),
            seconds=tuple(tally.seconds),
            recipe=None if (recipe := batches.problem.recipe) is None else recipe.describe(),
        )
        for sync, tally in tallies.items()
    }


class _Tally:
    """Totals over the steps of one strategy under one sync."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.summary = PlanSummary(num_ranks=problem.all_ranks, padding_multiple=problem.padding_multiple)
        self.groups: set[bytes] = set()
        self.over_budget = 0
        self.seconds: list[float] = []

    def add_priced(self, step: PricedStep) -> None:
        """Add a step of a strategy that prices its own execution, with its own lower bound."""
        self.seconds.append(step.seconds)
        self.summary.steps += 1
        self.summary.makespan_seconds += step.seconds
        self.summary.bound_seconds += step.bound_seconds
        self.summary.busy_rank_seconds += step.busy_rank_seconds

    def add(self, assignment: Assignment, batch: Batch, batch_as_run: Batch) -> None:
        """Add a step whose sequences run as in `batch_as_run`, against the lower bound of the batch itself."""
        if self._problem.sync == "iteration":
            assignment = replace(assignment, wave=np.full_like(assignment.wave, -1))
        step = assemble(assignment, batch_as_run, self._problem, step_bound_seconds(batch, self._problem))
        self.seconds.append(step.makespan_seconds)
        self.summary.add(step)
        # Counted from the planned step, not from the strategy's own claims.
        held = held_tokens(step, self._problem.padding_multiple)
        self.over_budget += int((held > step.degrees * self._problem.tokens_per_rank).sum())
        for i in np.flatnonzero(step.degrees > 1).tolist():
            self.groups.add(step.ranks[step.rank_offsets[i] : step.rank_offsets[i + 1]].tobytes())
