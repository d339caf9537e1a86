"""Verdict on a plan: predicted time relative to the best static degree and Megatron's dynamic CP, and remedies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, cast, get_args

import numpy as np

from fcp_cli.cost.profile import Origin
from fcp_cli.cost.recipe import flag_words
from fcp_cli.errors import FcpError, PlanError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.pricing import planned_sequences, step_prices
from fcp_cli.plan.setup import RankShape
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches, batch_of, sampled_steps, spread_steps
from fcp_cli.planning.candidates import is_compiled, solver_of
from fcp_cli.planning.compare import Contender
from fcp_cli.planning.make_plan import PlanResult
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem, Solver
from fcp_cli.planning.recipe import profiled_budget, sampled_seconds, unfixed_request
from fcp_cli.planning.settings import PlanInputs, computed_basis, problem_from
from fcp_cli.planning.solvers import DEFAULT, make_solver, strategy
from fcp_cli.planning.static import StaticSolver, best_static
from fcp_cli.util.console import Assumptions
from fcp_cli.util.validation import fields_of

MEGATRON: Final = "megatron-dynamic-cp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """Baseline that a plan is compared with.

    Attributes:
        name: solver name.
        label: display name.
        factor: predicted time / predicted time of the plan.
        steps: number of steps in the comparison.
    """

    name: str
    label: str
    factor: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Predicted benefit of a plan by the cost model.

    Attributes:
        device_hours: device-hours of an epoch under the plan.
        rivals: baselines that can run the data.
        remedy: best change of settings, or None if none that was tried is at least 2 % faster.
        tried: number of settings tried for it.
        profile: origin of the given cost profile, whose recipe limits the settings tried; None if none was given.
        device_hour_price: price of a device-hour in any currency, or None.
        enough_ranks: fewest ranks that take about as long, or None if all of `num_ranks` are needed.
    """

    solver: str
    steps: int
    device_hours: float
    rivals: tuple[Rival, ...]
    remedy: Remedy | None = None
    tried: int = 0
    profile: Origin | None = None
    device_hour_price: float | None = None
    num_ranks: int = 0
    enough_ranks: int | None = None

    @property
    def quickest_rival(self) -> Rival | None:
        """Fastest rival, or None."""
        return min(self.rivals, key=lambda rival: rival.factor, default=None)

    @property
    def saved_device_hours(self) -> float:
        """Device-hours per epoch saved over the fastest rival; negative if that is faster."""
        return self.device_hours * (self.quickest_rival.factor - 1.0) if self.quickest_rival else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for `--json`."""
        price = self.device_hour_price
        return {
            "device_hours_per_epoch": self.device_hours,
            "rivals": [
                {**asdict(one), "device_hours_per_epoch": one.factor * self.device_hours} for one in self.rivals
            ],
            "saved_device_hours_per_epoch": self.saved_device_hours,
            "saved_money_per_epoch": None if price is None else price * self.saved_device_hours,
            "remedy": None if self.remedy is None else asdict(self.remedy),
            "remedies_tried": self.tried,
            "enough_ranks": self.enough_ranks,
        }


def _device_hours(problem: Problem, step_seconds: float, steps: int) -> float:
    """Return the device-hours of a number of steps, counting all devices of the job."""
    devices = problem.all_ranks * problem.tensor_parallel * problem.pipeline_parallel
    return devices * step_seconds * steps / 3600.0


def plan_verdict(
    result: PlanResult,
    sample: Sequence[StepPlan],
    inputs: PlanInputs,
    static: tuple[float, int],
) -> Verdict:
    """Return the verdict on a finished plan, replanning a few of its steps with rivals and remedies.

    Args:
        result: finished plan.
        sample: planned steps to compare on.
        inputs: inputs of the plan.
        static: (predicted time of the best static plan / that of the sample, its degree).
    """
    solver, summary, problem = result.solver.name, result.summary, inputs.problem
    again = [sample[i] for i in sampled_steps(len(sample), result.metadata.global_batch_size)]
    sequences = [planned_sequences(step, inputs.table) for step in again]
    planned = sum(step.makespan_seconds for step in again)
    factor, degree = static
    rivals = [_rival("static", factor, len(sample), degree=degree)]
    found = _planned_again(sequences, problem, inputs.budget.for_rivals if inputs.budget else ())
    rivals += [_rival(name, seconds / planned, len(again)) for name, seconds in found]
    remedy, tried = best_remedy(inputs, sequences)
    return Verdict(
        solver=solver,
        steps=summary.steps,
        device_hours=_device_hours(problem, summary.mean_step_seconds, result.metadata.steps_per_epoch),
        rivals=tuple(rival for rival in rivals if rival.name != solver),
        remedy=remedy,
        tried=tried,
        profile=given_profile(inputs),
        device_hour_price=inputs.request.device_hour_price,
        num_ranks=problem.num_ranks,
        enough_ranks=enough_ranks(problem, sequences),
    )


def given_profile(inputs: PlanInputs) -> Origin | None:
    """Return the origin of the cost profile if one with a known recipe was given, else None."""
    is_given = inputs.budget is not None and inputs.budget.cluster is None and inputs.problem.recipe is not None
    return inputs.problem.profile.origin if is_given else None


def _planned_again(
    sequences: Sequence[LengthTable], problem: Problem, for_rivals: Sequence[Problem]
) -> Iterator[tuple[str, float]]:
    """Yield (name, predicted seconds) of Megatron's dynamic CP and of fcp, skipping those that cannot plan the batches.

    The recipe was chosen for fcp. Megatron's plans, which wait more and ignore the cost of recomputation, are often
    faster under another kind of recipe, so the fastest of all kinds counts.
    """
    if not sequences:
        return
    for name, problems in ((MEGATRON, (problem, *for_rivals)), (DEFAULT, (problem,))):
        if name == DEFAULT and not is_compiled(problem.sync):
            continue
        seconds = min(_seconds(name, sequences, each) for each in problems)
        if math.isfinite(seconds):
            yield name, seconds


def _seconds(name: str, sequences: Sequence[LengthTable], problem: Problem) -> float:
    """Return a strategy's predicted total seconds; infinity if it cannot plan the steps or its pipelines deadlock."""
    first = GlobalBatches(sequences[0], problem, BatchSettings(global_batch_size=len(sequences[0]), shuffle=False))
    solver = cast(Solver, solver_of(problem)) if name == DEFAULT else make_solver(name, first)
    batches = [batch_of(each, problem) for each in sequences]
    try:
        return sum(makespan_seconds(solver.assign(batch), batch, problem) for batch in batches)
    except PlanError:  # power-of-two degrees cannot hold every batch that fcp can
        return math.inf


def compared_verdict(contenders: Sequence[Contender], inputs: PlanInputs, batches: GlobalBatches) -> Verdict | None:
    """Return the verdict on fcp against the best compared strategies, or None if fcp or all rivals are missing.

    Args:
        contenders: contenders that planned all `batches`.
        inputs: inputs of the comparison.
        batches: compared global batches.
    """
    best = {one.name: one.best for one in contenders if one.best is not None and not strategy(one.name).own_execution}
    others = {name: one for name, one in best.items() if name != DEFAULT and not one.over_budget}
    if DEFAULT not in best or not others:
        return None
    quickest = min(others, key=lambda name: others[name].step_seconds)
    rivals = [name for name in dict.fromkeys(("static", MEGATRON, quickest)) if name in others]
    ours, steps = best[DEFAULT], len(batches)
    inputs = replace(inputs, problem=replace(inputs.problem, sync=ours.sync))
    rows = [batches.batch(step).rows for step in sampled_steps(steps, batches.settings.global_batch_size)]
    again = [batches.table.take(each) for each in rows]
    remedy, tried = best_remedy(inputs, again)
    return Verdict(
        solver=DEFAULT,
        steps=steps,
        device_hours=_device_hours(inputs.problem, ours.step_seconds, batches.steps_per_epoch),
        rivals=tuple(
            _rival(name, best[name].step_seconds / ours.step_seconds, steps, degree=best[name].options.get("degree"))
            for name in rivals
        ),
        remedy=remedy,
        tried=tried,
        profile=given_profile(inputs),
        device_hour_price=inputs.request.device_hour_price,
        num_ranks=inputs.problem.num_ranks,
        enough_ranks=enough_ranks(inputs.problem, again),
    )


def _rival(name: str, factor: float, steps: int, *, degree: int | None = None) -> Rival:
    labels = {MEGATRON: "Megatron's dynamic CP", "static": f"static degree {degree}"}
    return Rival(name=name, label=labels.get(name, name), factor=factor, steps=steps)


# Changes of settings that make steps faster than planning alone can: token budget, recomputation, sync, ranks.

_LEAST_GAIN: Final = 0.02  # smaller ones are within the cost model's error
_AS_LONG: Final = 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Settings under which the same sequences would take less time.

    Attributes:
        flags: `fcp plan` options to add to the given ones.
        factor: predicted seconds under these settings / predicted seconds as requested.
        steps: number of steps in the comparison.
    """

    flags: str
    factor: float
    tokens_per_rank: int
    steps: int


def best_remedy(inputs: PlanInputs, sequences: Sequence[LengthTable]) -> tuple[Remedy | None, int]:
    """Return the settings with the largest gain, and the number of settings tried.

    Args:
        sequences: a few global batches, which are replanned under each setting.

    Returns:
        (remedy, tried): the remedy is None if no setting is at least 2 % faster.
    """
    if not sequences or inputs.budget is None or not is_compiled(inputs.problem.sync):
        return None, 0
    longest = max(int(each.length_tokens.max()) for each in sequences)
    now, found = sampled_seconds(inputs.problem, sequences), []
    for problem in _problems_to_try(inputs):
        if longest <= problem.num_ranks * problem.tokens_per_rank and (flags := _flags(inputs, problem)):
            factor = sampled_seconds(problem, sequences) / now
            tokens = problem.tokens_per_rank
            found.append(Remedy(flags=flags, factor=factor, tokens_per_rank=tokens, steps=len(sequences)))
    best = min(found, key=lambda remedy: remedy.factor, default=None)
    tried = max(inputs.budget.tried, len(found))
    return (best if best is not None and best.factor <= 1.0 - _LEAST_GAIN else None), tried


def enough_ranks(problem: Problem, sequences: Sequence[LengthTable]) -> int | None:
    """Return the fewest ranks, by halving, whose steps are at most 1 % slower, or None if half are too few.

    Args:
        problem: problem of the plan; the token budget per rank is kept.
        sequences: a few global batches.
    """
    is_plain = problem.pipeline is None and problem.encoder_balance is None and problem.rank_speeds is None
    if not sequences or not is_plain or problem.pipeline_parallel > 1 or not is_compiled(problem.sync):
        return None
    most, longest = (
        _AS_LONG * sampled_seconds(problem, sequences),
        max(int(each.length_tokens.max()) for each in sequences),
    )
    found, ranks = None, problem.num_ranks
    while ranks % 2 == 0:
        ranks //= 2
        fewer = replace(problem, num_ranks=ranks, ranks_per_node=min(problem.ranks_per_node, ranks))
        if longest > ranks * problem.tokens_per_rank or sampled_seconds(fewer, sequences) > most:
            break
        found = ranks
    return found


def _problems_to_try(inputs: PlanInputs) -> Iterator[Problem]:
    """Yield the problem under the fastest recipe; with a given profile, which fixes the recipe, one for each sync."""
    assert inputs.budget is not None
    request = inputs.request
    open_ = replace(request, tokens_per_rank=None, sync=None, recipe=unfixed_request(request.recipe))
    if inputs.budget.cluster is not None:
        requests = [] if inputs.budget.tried and open_ == request else [open_]
    else:
        requests = [replace(open_, sync=sync) for sync in get_args(Sync)]
    for changed in requests:
        with suppress(FcpError):  # skip requests that do not fit or need another profile
            problem = problem_under(changed, inputs)
            if problem != inputs.problem and is_compiled(problem.sync):
                yield problem


def _flags(inputs: PlanInputs, problem: Problem) -> str:
    """Return the options that change a plan's problem to another one."""
    now, then, words = inputs.problem.recipe, problem.recipe, []
    if now is not None and then is not None:
        names = ["zero_stage", "recompute", "offload", *(["reduce"] if then.zero_stage == 3 else [])]
        for name in (name for name in names if getattr(now, name) != getattr(then, name)):
            words += flag_words(name, getattr(then, name))
        if now.shards(problem.num_ranks) != (shards := then.shards(problem.num_ranks)):
            words += ["--shard-ranks", str(shards)]
    words += [] if problem.sync == inputs.problem.sync else ["--sync", problem.sync]
    words += [] if inputs.request.tokens_per_rank is None else ["--tokens-per-rank", str(problem.tokens_per_rank)]
    return " ".join(words)


def problem_under(request: PlanRequest, inputs: PlanInputs) -> Problem:
    """Return the problem of the same ranks under a request with another recipe, sync or token budget.

    Without a given profile, the recipe is the fastest that the request allows on the plan's data.

    Args:
        request: changed request.
        inputs: inputs of the plan, from `resolve`.
    """
    now, assumptions = inputs.problem, Assumptions()
    known = inputs.budget
    ranks = JobRanks(**fields_of(RankShape, now), virtual_stages=now.virtual_stages, most_peers=request.max_peers)
    if known is None or known.cluster is None:
        ranks = ranks.that_share(request.attention, prices_heads=now.profile.heads is not None)
        return problem_from(
            request, now.profile, ranks, profiled_budget(request, now.profile, ranks, assumptions), assumptions
        )
    request = replace(
        request,
        ranks=ranks.num_ranks,
        ranks_per_node=ranks.ranks_per_node,
        tensor_parallel=ranks.tensor_parallel,
        pipeline_parallel=ranks.pipeline_parallel,
        virtual_stages=ranks.virtual_stages,
    )
    basis = computed_basis(request, assumptions, cluster=known.cluster, data=inputs.data)
    return problem_from(request, *basis, assumptions)


# Speedup of a plan over the best static plan of the same steps.

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
