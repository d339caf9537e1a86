"""Search for the recipe with the least predicted time on a sample of the plan's steps.

Every recipe that fits has a proven lower bound of the sampled steps. Recipes are planned in draft by ascending bound
until the next bound is no less than the fastest draft, and only the fastest drafts are planned in full. Offloading
activations must gain 1 %. The search limits its work by counts, not by time, so that the same data, seed and profile
give the same recipe on every machine.
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

_MANY_RANKS: Final = 256  # with more ranks, or pipelines, planning is slow and the sample is one step
_MOST_DRAFTED: Final = 12  # limit of drafted recipes
_FOR_RUNNER_UP: Final = 6  # until so many drafts, the second-fastest is the limit, too, to find a runner-up
_MOST_PLANNED: Final = 3  # drafts to plan in full, since a draft is up to 1.5 % slower than its plan
_LEAST_GAIN: Final = 0.01  # least gain of offloading over the fastest recipe without it
_UNKNOWN_SEQUENCES: Final = 512  # sequences of the synthetic step if lengths are unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeData:
    """Data that recipes are compared on.

    Attributes:
        table: sequence lengths.
        settings: batch settings of the plan; its step limit is ignored, so that a short plan gets the same recipe.
        max_degree: 1 forbids rings; None: no limit.
        least_tokens: least token budget of a recipe, if sequences may exceed those of the table.
        as_needed: whether to try as-needed recomputation; False if lengths are only known at run time, or if compared
            strategies do not account for it.
    """

    table: LengthTable
    settings: BatchSettings
    max_degree: int | None = None
    least_tokens: int = 1
    as_needed: bool = True

    def fits_into(self, problem: Problem) -> bool:
        """Return whether the ranks can hold the longest sequence."""
        heads, ranks = problem.profile.heads, problem.num_ranks
        if self.max_degree == 1:
            ranks = 1
        elif problem.attention == "ulysses" and heads is not None:
            ranks = max((1, *heads.degrees(ranks)))
        longest = min(int(self.table.length_tokens.max()), self.settings.max_length or 1 << 62)
        return problem.tokens_per_rank >= max(self.least_tokens, -(-longest // ranks))

    def sample(self, problem: Problem) -> list[LengthTable]:
        """Return the sequences of a few steps, evenly spaced over an epoch, or of the first if planning is slow."""
        batches = GlobalBatches(self.table, problem, replace(self.settings, step_limit=None))
        is_slow = problem.pipeline is not None or problem.num_ranks > _MANY_RANKS
        few = [] if is_slow else sampled_steps(batches.steps_per_epoch, self.settings.global_batch_size)
        return [batches.table.take(batches.batch(step).rows) for step in few or [0]]


def unknown_lengths(max_degree: int | None = None) -> RecipeData:
    """Return sample data for lengths only known at run time, log-spaced from 128 to 32,768 tokens.

    Longer ones may occur, so recipes must have a token budget of at least `LEAST_TOKENS`.
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
    """Result of a recipe search.

    Attributes:
        fit: fastest recipe, or one without offloading that is less than 1 % slower.
        seconds: predicted mean seconds of a sampled step.
        others: (candidate, seconds) of the other drafted or planned ones, fastest first.
        tried: number of recipes that were planned or pruned by their bound.
        steps: number of steps of the sample.
    """

    fit: FittedRecipe
    seconds: float
    others: tuple[tuple[RecipeCandidate, float], ...]
    tried: int
    steps: int

    @property
    def for_rivals(self) -> tuple[Problem, ...]:
        """Problems under the other recipes, which may be faster for a rival strategy."""
        return tuple(other.problem for other, _seconds in self.others)

    def reason(self) -> str:
        """Return the reason of an assumption: predicted time, and comparison with the runner-up."""
        where = f"{duration(self.seconds)} a step on {counted(self.steps, 'step')}"
        (other, seconds), *_rest = self.others
        second = f"{other.fit.recipe.describe()}, sync {other.fit.sync}, takes {seconds / self.seconds - 1:+.1%}"
        return f"the quickest of {self.tried} that fit: {where}; the second, {second}"


def quickest_recipe(
    candidates: Sequence[RecipeCandidate], usual: FittedRecipe, data: RecipeData
) -> RecipeChoice | None:
    """Return the recipe with the least predicted time of the sampled steps, or None with fewer than two candidates.

    Args:
        candidates: recipes that fit, in the fixed order, which breaks ties.
        usual: recipe of `fitting_recipe`, which is always planned as well.
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
    # Plan one of each kind regardless of its bound, since rivals are priced under it, too.
    # Reversed, so that the dict keeps the one with the least bound.
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
    # Offloading risks running out of host memory, so it must gain at least _LEAST_GAIN.
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
    """Return the settings that only some strategies support: sync, and whether recomputation is as needed."""
    return candidate.problem.sync, bool(candidate.fit.level_tokens)


def _limit(found: Sequence[float]) -> float:
    """Return the lower bound from which a recipe is not worth drafting, given the seconds of the drafts so far."""
    if len(found) >= _MOST_DRAFTED:
        return 0.0
    return math.inf if len(found) < 2 else sorted(found)[1 if len(found) < _FOR_RUNNER_UP else 0]


def sampled_seconds(
    problem: Problem, sample: Sequence[LengthTable], *, max_degree: int | None = None, is_draft: bool = False
) -> float:
    """Return the predicted mean seconds of the sampled steps; drafts are faster to plan and slightly slower to run."""
    solver = solver_of(problem, max_degree=max_degree)
    assign = solver.draft if is_draft else solver.assign
    batches = [batch_of(each, problem) for each in sample]
    return sum(makespan_seconds(assign(batch), batch, problem) for batch in batches) / len(batches)


def _bound(problem: Problem, sample: Sequence[LengthTable]) -> float:
    return sum(lower_bound_seconds(batch_of(each, problem).work, problem) for each in sample) / len(sample)
