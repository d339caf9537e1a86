"""Verdict on planning: seconds of the best static degree and of Megatron's dynamic CP, and remedies."""

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
    """Baseline of a user without a plan.

    Attributes:
        name: the name, as a solver.
        label: the label, as people call it.
        factor: its predicted time / the plan's.
        steps: the steps that this was computed on.
    """

    name: str
    label: str
    factor: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a plan pays, by the cost model.

    Attributes:
        device_hours: the device-hours that an epoch takes under the plan.
        rivals: those that can run the data at all.
        remedy: the setting under which fcp would be quickest by far; None: none that was tried.
        tried: settings that were tried for that.
        profile: the origin of the cost profile that was given, under whose recipe alone they were; None: none was.
        device_hour_price: the price of a device-hour in any currency; None if unknown.
        enough_ranks: the fewest ranks that would take as long; None: all of `num_ranks` are needed.
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
        """The quickest of the rivals."""
        return min(self.rivals, key=lambda rival: rival.factor, default=None)

    @property
    def saved_device_hours(self) -> float:
        """Device-hours an epoch less than the quickest rival; negative if that is quicker."""
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
    """Return the duration of so many steps of the same mean seconds."""
    devices = problem.all_ranks * problem.tensor_parallel * problem.pipeline_parallel
    return devices * step_seconds * steps / 3600.0


def plan_verdict(
    result: PlanResult,
    sample: Sequence[StepPlan],
    inputs: PlanInputs,
    request: PlanRequest,
    static: tuple[float, int],
) -> Verdict:
    """Return the verdict on a finished plan; a few of its steps are planned again for that.

    Args:
        inputs: the inputs that it was made of.
        request: the request that it was asked with.
        static: predicted time of the best static plan / that of the sample, and its degree.
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
    """Return the origin of a cost profile that was given and has the times of one recipe; None: there is none."""
    is_given = inputs.budget is not None and inputs.budget.cluster is None and inputs.problem.recipe is not None
    return inputs.problem.profile.origin if is_given else None


def _planned_again(
    sequences: Sequence[LengthTable], problem: Problem, for_rivals: Sequence[Problem]
) -> Iterator[tuple[str, float]]:
    """Yield the predicted seconds of Megatron's dynamic CP and of fcp, if they can plan these batches at once.

    The recipe was chosen for fcp's plans. Megatron's, which wait longer for each other and fill their budgets whatever
    that recomputes, are often quicker under a recipe of another kind, so they are priced under each.
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
    """Return a strategy's predicted seconds of all steps; infinity if it cannot plan them, or its pipelines hang."""
    first = GlobalBatches(sequences[0], problem, BatchSettings(global_batch_size=len(sequences[0]), shuffle=False))
    solver = cast(Solver, solver_of(problem)) if name == DEFAULT else make_solver(name, first)
    batches = [batch_of(each, problem) for each in sequences]
    try:
        return sum(makespan_seconds(solver.assign(batch), batch, problem) for batch in batches)
    except PlanError:  # degrees of powers of two cannot hold all that fcp can
        return math.inf


def compared_verdict(
    contenders: Sequence[Contender], inputs: PlanInputs, request: PlanRequest, batches: GlobalBatches
) -> Verdict | None:
    """Return the verdict on fcp against the best of the compared strategies; None if fcp or all rivals are missing.

    Args:
        contenders: the contenders that planned all `batches`.
        inputs: the inputs that they were compared under.
        request: the request that this was asked with.
        batches: the compared ones.
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
