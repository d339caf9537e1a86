"""Verdict on a plan: predicted time relative to the best static degree and Megatron's dynamic CP, and remedies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, cast

from fcp_cli.cost.profile import Origin
from fcp_cli.errors import PlanError
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.pricing.packs import planned_sequences
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches, batch_of, sampled_steps
from fcp_cli.planning.dataset.comparison import Contender
from fcp_cli.planning.dataset.run import PlanResult
from fcp_cli.planning.fcp.solver import is_compiled, solver_of
from fcp_cli.planning.problem import Problem, Solver
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.planning.settings.remedies import Remedy, best_remedy, enough_ranks
from fcp_cli.planning.settings.settings import PlanInputs
from fcp_cli.planning.solvers import DEFAULT, make_solver, strategy

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
    request: PlanRequest,
    static: tuple[float, int],
) -> Verdict:
    """Return the verdict on a finished plan, replanning a few of its steps with rivals and remedies.

    Args:
        result: finished plan.
        sample: planned steps to compare on.
        inputs: inputs of the plan.
        request: request of the plan.
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
    remedy, tried = best_remedy(request, inputs, sequences)
    return Verdict(
        solver=solver,
        steps=summary.steps,
        device_hours=_device_hours(problem, summary.mean_step_seconds, result.metadata.steps_per_epoch),
        rivals=tuple(rival for rival in rivals if rival.name != solver),
        remedy=remedy,
        tried=tried,
        profile=given_profile(inputs),
        device_hour_price=request.device_hour_price,
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


def compared_verdict(
    contenders: Sequence[Contender], inputs: PlanInputs, request: PlanRequest, batches: GlobalBatches
) -> Verdict | None:
    """Return the verdict on fcp against the best compared strategies, or None if fcp or all rivals are missing.

    Args:
        contenders: contenders that planned all `batches`.
        inputs: inputs of the comparison.
        request: request of the comparison.
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
    remedy, tried = best_remedy(request, inputs, again)
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
        device_hour_price=request.device_hour_price,
        num_ranks=inputs.problem.num_ranks,
        enough_ranks=enough_ranks(inputs.problem, again),
    )


def _rival(name: str, factor: float, steps: int, *, degree: int | None = None) -> Rival:
    labels = {MEGATRON: "Megatron's dynamic CP", "static": f"static degree {degree}"}
    return Rival(name=name, label=labels.get(name, name), factor=factor, steps=steps)
