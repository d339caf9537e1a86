"""Verdict on a plan: predicted time relative to the strategies that can be used today, and remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, get_args

import numpy as np

from fcp_cli.cost.profile import Origin
from fcp_cli.cost.recipe import flag_words
from fcp_cli.errors import FcpError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.models.cluster import ClusterSpec
from fcp_cli.plan.metadata import Baseline, Baselines, PlanMetadata, Sync
from fcp_cli.plan.pricing import planned_sequences, step_prices
from fcp_cli.plan.setup import RankShape
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import GlobalBatches, batch_of, sampled_steps, spread_steps
from fcp_cli.planning.compare import SYNCS, USABLE, Contender, compare_recipes
from fcp_cli.planning.fcp_solver import is_compiled
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.recipe import profiled_budget, sampled_seconds, unfixed_request
from fcp_cli.planning.settings import PlanInputs, computed_basis, problem_from
from fcp_cli.planning.solvers import DEFAULT, works_under
from fcp_cli.planning.static import best_static
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
        spread: least and most factor of a step.
    """

    name: str
    label: str
    factor: float
    spread: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Predicted benefit of a plan by the cost model.

    Attributes:
        steps: steps that were compared.
        steps_per_epoch: steps of an epoch.
        device_hours: device-hours of an epoch under the plan, from the compared steps.
        rivals: baselines that can run the data.
        remedy: best change of settings, or None if none that was tried is at least 2 % faster.
        tried: number of settings tried for it.
        profile: origin of the given cost profile, whose recipe limits the settings tried; None if none was given.
        device_hour_price: price of a device-hour in any currency, or None.
        enough_ranks: fewest ranks that take about as long, or None if all of `num_ranks` are needed.
        is_example: whether the cluster is one of the shipped examples, which nobody has.
    """

    solver: str
    steps: tuple[int, ...]
    steps_per_epoch: int
    device_hours: float
    rivals: tuple[Rival, ...]
    remedy: Remedy | None = None
    tried: int = 0
    profile: Origin | None = None
    device_hour_price: float | None = None
    num_ranks: int = 0
    enough_ranks: int | None = None
    is_example: bool = False

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
            "steps": self.steps,
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


def compared_steps(batches: GlobalBatches, most: int | None = None) -> list[int]:
    """Return the evenly spaced batches that strategies are compared on: a few, or `most`."""
    steps, size = len(batches), batches.settings.global_batch_size
    return spread_steps(steps, most) if most is not None else sampled_steps(steps, size) or [0]


def compared_syncs(inputs: PlanInputs, given: Sync | None) -> tuple[Sync, ...]:
    """Return the syncs that strategies are compared under: both, unless `--sync` or interleaved stages fix one."""
    return SYNCS if given is None and inputs.problem.virtual_stages == 1 else (inputs.problem.sync,)


def priced_baselines(inputs: PlanInputs, solver: str, syncs: Sequence[Sync]) -> Baselines | None:
    """Return the step times of the strategies that can be used today, and of fcp if the plan is another solver's.

    Of batches beyond the size of the sample, only the static plan is priced: the others take minutes.
    """
    batches = inputs.batches()
    steps = compared_steps(batches)
    is_small = bool(sampled_steps(len(batches), batches.settings.global_batch_size))
    names = [*USABLE, *([DEFAULT] if is_compiled(inputs.problem.sync) else [])] if is_small else ["static"]
    names = [name for name in names if name != solver and works_under(name, inputs.problem.profile)]
    return baselines_of(compare_recipes(inputs, steps, names=names, syncs=syncs), steps, batches.first_step)


def baselines_of(contenders: Iterable[Contender], steps: Sequence[int], first_step: int) -> Baselines | None:
    """Return the times of contenders that fit into memory, or None if none does."""
    found = []
    for one in contenders:
        if one.best is not None and not one.best.over_budget:
            degree = one.best.options.get("degree")
            label = _LABELS.get(one.name, one.name).format(degree=degree)
            found.append(Baseline(name=one.name, label=label, seconds=one.best.seconds))
    return Baselines(steps=tuple(first_step + k for k in steps), strategies=tuple(found)) if found else None


_LABELS: Final = {
    "static": "static degree {degree}",
    "deepspeed-ulysses": "DeepSpeed-Ulysses",
    "usp": "USP",
    MEGATRON: "Megatron's dynamic CP",
    "padded": "padding",
}


def rivals_of(baselines: Baselines, seconds: Mapping[int, float]) -> tuple[Rival, ...]:
    """Return the baselines relative to the step times of a plan, by step; () if none of their steps is among them."""
    at = [k for k, step in enumerate(baselines.steps) if step in seconds]
    if not at:
        return ()
    ours = np.array([seconds[baselines.steps[k]] for k in at])
    found = []
    for one in baselines.strategies:
        theirs = np.array(one.seconds)[at]
        factors = theirs / ours
        factor, spread = float(theirs.sum() / ours.sum()), (float(factors.min()), float(factors.max()))
        found.append(Rival(name=one.name, label=one.label, factor=factor, spread=spread))
    return tuple(found)


def verdict_on(solver: str, seconds: Mapping[int, float], baselines: Baselines, inputs: PlanInputs) -> Verdict | None:
    """Return the verdict on a plan, from its step times by step; None without a comparable step.

    Args:
        solver: the plan's solver.
        seconds: predicted step times of the plan, at least of the baselines' steps.
        baselines: see `priced_baselines`.
        inputs: inputs of the plan.
    """
    rivals = rivals_of(baselines, seconds)
    if not rivals:
        return None
    batches, problem = inputs.batches(), inputs.problem
    steps = tuple(step for step in baselines.steps if step in seconds)
    sequences = [batches.table.take(batches.batch(step - batches.first_step).rows) for step in steps]
    if not sampled_steps(len(batches), batches.settings.global_batch_size):
        sequences = []  # too many to plan once more
    remedy, tried = best_remedy(inputs, sequences)
    devices = problem.all_ranks * problem.tensor_parallel * problem.pipeline_parallel
    epoch_seconds = batches.steps_per_epoch * sum(seconds[step] for step in steps) / len(steps)
    return Verdict(
        solver=solver,
        steps=steps,
        steps_per_epoch=batches.steps_per_epoch,
        device_hours=devices * epoch_seconds / 3600.0,
        rivals=rivals,
        remedy=remedy,
        tried=tried,
        profile=given_profile(inputs),
        device_hour_price=inputs.request.device_hour_price,
        num_ranks=problem.num_ranks,
        enough_ranks=enough_ranks(problem, sequences),
        is_example="--cluster" in inputs.assumptions.assumed and problem.profile.cluster.startswith("example"),
    )


def given_profile(inputs: PlanInputs) -> Origin | None:
    """Return the origin of the cost profile if one with a known recipe was given, else None."""
    is_given = inputs.budget is not None and inputs.budget.cluster is None and inputs.problem.recipe is not None
    return inputs.problem.profile.origin if is_given else None


# Changes of settings that make steps faster than planning alone can: token budget, recomputation, sync, stages, ranks.

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
    if inputs.problem.pipeline is not None:
        sequences = sequences[:1]  # as for the search of recipes: planning is slow
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
    most = _AS_LONG * sampled_seconds(problem, sequences)
    longest = max(int(each.length_tokens.max()) for each in sequences)
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
    now, cluster = inputs.problem, inputs.budget.cluster
    if cluster is None or now.pipeline_parallel == 1:
        return
    for stages in dict.fromkeys((now.pipeline_parallel // 2, 1)):
        # On the same devices: fewer stages wait less, and more replicas share the sequences.
        ranks = now.num_ranks * now.pipeline_parallel // stages
        sync = request.sync if stages == 1 else now.sync  # of pipelines, each recipe takes long to plan for
        with suppress(FcpError):
            yield _computed_problem(replace(request, pipeline_parallel=stages, ranks=ranks, sync=sync), inputs, cluster)


def _flags(inputs: PlanInputs, problem: Problem) -> str:
    """Return the options that change a plan's problem to another one."""
    if problem.pipeline_parallel != inputs.problem.pipeline_parallel:  # its recipe is then searched
        ranks = "" if inputs.request.ranks is None else f" --ranks {problem.num_ranks}"
        return f"--pipeline-parallel {problem.pipeline_parallel}{ranks}"
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
    return _computed_problem(request, inputs, known.cluster)


def _computed_problem(request: PlanRequest, inputs: PlanInputs, cluster: ClusterSpec) -> Problem:
    """Return the problem of a request on a cluster, under the fastest recipe for the plan's data."""
    basis = computed_basis(request, Assumptions(), cluster=cluster, data=inputs.data)
    return problem_from(request, *basis, Assumptions())


# The static plan of a typical step, for the page of `fcp report`.


def static_speedup(metadata: PlanMetadata, seconds: Mapping[int, float]) -> float | None:
    """Return the speed-up of a plan with these step times over its static baseline; None if that was not priced."""
    found = () if metadata.baselines is None else rivals_of(metadata.baselines, seconds)
    return next((one.factor for one in found if one.name == "static"), None)


def typical_pair(
    steps: Sequence[StepPlan], problem: Problem, *, manifest: LengthTable | None = None
) -> tuple[StepPlan, StepPlan] | None:
    """Return the step whose speedup over static is nearest to that of all steps, and the same step under static.

    Args:
        steps: planned steps.
        problem: the plan's problem, whose recipe the static plan gets as well.
        manifest: source of `eta` and vision columns.

    Returns:
        None if the recorded times cannot be reproduced, e.g. if they depend on a manifest that was not given.
    """
    if not all(_follows_profile(step, problem, manifest) for step in steps):
        return None
    batches = [batch_of(planned_sequences(step, manifest), problem) for step in steps]
    solver, _ = best_static(problem, max(int(step.lengths.max()) for step in steps), batches)
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
