"""Chooses the recipe whose steps take the least predicted time, on a sample of the steps of a plan.

Every recipe that fits has a proven lower bound of the sampled steps; by rising bound, recipes are planned in draft
until the next bound is no less than the quickest draft. Only the quickest drafts are planned as the plan will be.
Offloading activations must gain 1 %. The search counts its work and reads no clock, so that the same data, seed and
profile give the same recipe on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fcp_cli.console import note
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.memory.fitting import LEAST_TOKENS, FittedRecipe
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batching.batches import BatchSettings, GlobalBatches, batch_of, sampled_steps
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.fcp.solver import is_compiled, solver_of
from fcp_cli.planning.problem import Problem
from fcp_cli.words import counted, duration

_MANY_RANKS: Final = 256  # above which, and for pipelines, whose steps take longer to plan, one step is the sample
_MOST_DRAFTED: Final = 12  # recipes of which the sample is planned in draft
_FOR_RUNNER_UP: Final = 6  # of these, to find the second-quickest, too
_MOST_PLANNED: Final = 3  # of these, planned in full: a draft is up to 1.5 % slower than its plan
_LEAST_GAIN: Final = 0.01  # of offloading, over the quickest recipe without it
_UNKNOWN_SEQUENCES: Final = 512  # of a step whose lengths are not known yet


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeData:
    """Data on whose steps recipes are compared.

    Attributes:
        table: lengths.
        settings: the settings of the plan; its step limit does not matter, so that the first steps have the recipe of
            all.
        max_degree: 1 forbids rings; None: no limit.
        least_tokens: token budget that a recipe must leave, if longer sequences than those of the table may come.
        as_needed: try recomputation as needed, too; not if lengths come at run time, or if strategies that pack
            without regard to it are compared.
    """

    table: LengthTable
    settings: BatchSettings
    max_degree: int | None = None
    least_tokens: int = 1
    as_needed: bool = True

    def fits_into(self, problem: Problem) -> bool:
        """Return whether the ranks hold the longest sequence."""
        heads, ranks = problem.profile.heads, problem.num_ranks
        if self.max_degree == 1:
            ranks = 1
        elif problem.attention == "ulysses" and heads is not None:
            ranks = max((1, *heads.degrees(ranks)))
        longest = min(int(self.table.length_tokens.max()), self.settings.max_length or 1 << 62)
        return problem.tokens_per_rank >= max(self.least_tokens, -(-longest // ranks))

    def sample(self, problem: Problem) -> list[LengthTable]:
        """Return the sequences of a few steps, evenly spaced over an epoch."""
        batches = GlobalBatches(self.table, problem, replace(self.settings, step_limit=None))
        is_slow = problem.pipeline is not None or problem.num_ranks > _MANY_RANKS
        few = [] if is_slow else sampled_steps(batches.steps_per_epoch, self.settings.global_batch_size)
        return [batches.table.take(batches.batch(step).rows) for step in few or [0]]


def unknown_lengths(max_degree: int | None = None) -> RecipeData:
    """Return sample data for lengths only known at run time: spaced evenly in log from 128 to 32,768 tokens.

    Longer ones may come, so that recipes must leave 16,384 tokens a rank.
    """
    last = _UNKNOWN_SEQUENCES - 1
    lengths = [round(128 * 256 ** (rank / last)) for rank in range(_UNKNOWN_SEQUENCES)]
    return RecipeData(
        table=LengthTable(name="unknown lengths", length_tokens=np.array(lengths, dtype=np.int64)),
        settings=BatchSettings(global_batch_size=_UNKNOWN_SEQUENCES, shuffle=False),
        max_degree=max_degree,
        least_tokens=LEAST_TOKENS,
        as_needed=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeCandidate:
    """A recipe that fits, and the plan's problem under it."""

    fit: FittedRecipe
    problem: Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeChoice:
    """The quickest recipe, and others.

    Attributes:
        fit: the quickest recipe, or one without offloading that is hardly slower.
        seconds: predicted mean of a sampled step under it.
        others: (candidate, seconds) of the other planned ones, quickest first.
        tried: recipes that were planned or ruled out by their bound.
        steps: the steps of the sample.
    """

    fit: FittedRecipe
    seconds: float
    others: tuple[tuple[RecipeCandidate, float], ...]
    tried: int
    steps: int

    @property
    def for_rivals(self) -> tuple[Problem, ...]:
        """The problems under the other planned recipes, under which a rival may be quicker."""
        return tuple(other.problem for other, _seconds in self.others)

    def reason(self) -> str:
        """Return why this recipe, for the line of an assumption: its time, and the second-quickest recipe."""
        where = f"{duration(self.seconds)} a step on {counted(self.steps, 'step')}"
        (other, seconds), *_rest = self.others
        second = f"{other.fit.recipe.describe()}, sync {other.fit.sync}, takes {seconds / self.seconds - 1:+.1%}"
        return f"the quickest of {self.tried} that fit: {where}; the second, {second}"


def quickest_recipe(
    candidates: Sequence[RecipeCandidate], usual: FittedRecipe, data: RecipeData
) -> RecipeChoice | None:
    """Return the recipe with the least predicted time of the sampled steps; None if there is no choice.

    Args:
        candidates: recipes that fit, in the fixed order, which decides between equal times.
        usual: the first recipe of that order that leaves enough tokens; never quicker than the chosen one.
        data: lengths to hold, and steps to compare on.
    """
    held = [one for one in candidates if data.fits_into(one.problem)]
    if len(held) < 2:
        return None
    if not all(is_compiled(one.problem.sync) for one in held):
        note("compiling the planner: about a minute, once on this machine")
    sample = data.sample(max((one.problem for one in held), key=lambda problem: problem.tokens_per_rank))
    bounds = [_bound(one.problem, sample) for one in held]
    drafts: dict[int, float] = {}
    first = [index for index, one in enumerate(held) if one.fit.key == usual.key]
    by_bound = sorted(range(len(held)), key=lambda index: bounds[index])
    # One of each kind is planned, at any bound: rivals are priced under it, too.
    # Reversed, so that of each kind the one with the least bound stays.
    anyway = [*first, *{_kind(held[index]): index for index in reversed(by_bound)}.values()]
    for index in [*anyway, *by_bound]:
        if index in drafts:
            continue
        if index not in anyway and bounds[index] >= _limit(list(drafts.values())):
            break
        drafts[index] = sampled_seconds(held[index].problem, sample, max_degree=data.max_degree, is_draft=True)
    by_draft = sorted(drafts, key=lambda index: (drafts[index], index))
    offloads_nothing = [index for index in by_draft if held[index].fit.recipe.offload == "none"]
    planned = {
        index: sampled_seconds(held[index].problem, sample, max_degree=data.max_degree)
        for index in {*by_draft[:_MOST_PLANNED], *offloads_nothing[:1], *first}
    }
    found = {**drafts, **planned}
    order = sorted(found, key=lambda index: (found[index], index))
    # The host's memory is another thing that may run out: for less than that, nothing is offloaded.
    resident = next((index for index in order if index in planned and index in offloads_nothing), order[0])
    best = resident if found[resident] <= (1.0 + _LEAST_GAIN) * found[order[0]] else order[0]
    order.remove(best)
    return RecipeChoice(
        fit=held[best].fit,
        seconds=found[best],
        others=tuple((held[index], found[index]) for index in order),
        tried=len(held),
        steps=len(sample),
    )


def _kind(candidate: RecipeCandidate) -> tuple[str, bool]:
    """Return the settings of a recipe that only some strategies support: its sync, and recomputation as needed."""
    return candidate.problem.sync, bool(candidate.fit.level_tokens)


def _limit(found: Sequence[float]) -> float:
    """Return the bound from which on no further recipe is drafted: none below it is quicker, or the runner-up."""
    if len(found) >= _MOST_DRAFTED:
        return 0.0
    return math.inf if len(found) < 2 else sorted(found)[1 if len(found) < _FOR_RUNNER_UP else 0]


def sampled_seconds(
    problem: Problem, sample: Sequence[LengthTable], *, max_degree: int | None = None, is_draft: bool = False
) -> float:
    """Return the predicted mean seconds of steps of these sequences; of a draft, some that are hardly longer."""
    solver = solver_of(problem, max_degree=max_degree)
    assign = solver.draft if is_draft else solver.assign
    batches = [batch_of(each, problem) for each in sample]
    return sum(makespan_seconds(assign(batch), batch, problem) for batch in batches) / len(batches)


def _bound(problem: Problem, sample: Sequence[LengthTable]) -> float:
    return sum(lower_bound_seconds(batch_of(each, problem).work, problem) for each in sample) / len(sample)
