"""Remedies that shorten steps more than any plan can: a larger token budget, other recomputation, another sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from fcp_cli.errors import FcpError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.fcp.solver import is_compiled, solver_of
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings import PlanInputs, problem_under
from fcp_cli.recipe import Recompute

_SYNCS: Final = get_args(Sync)
_LEAST_GAIN: Final = 0.02  # smaller ones are within the cost model's error
_AS_LONG: Final = 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A setting under which the same sequences would take less time.

    Attributes:
        flags: of `fcp plan`, in addition to the given ones.
        factor: predicted seconds of fcp under it / of fcp as it was asked for.
        tokens_per_rank: under it.
        steps: that this was computed on.
    """

    flags: str
    factor: float
    tokens_per_rank: int
    steps: int


def best_remedy(
    request: PlanRequest, inputs: PlanInputs, sequences: Sequence[LengthTable]
) -> tuple[Remedy | None, int]:
    """Return the setting that would help most, and how many were tried.

    Args:
        request: of the plan.
        inputs: of the plan.
        sequences: a few of its global batches, which are planned again under each setting.

    Returns:
        None as remedy where nothing that was tried is quicker by 2 %; 0 tried where nothing could be.
    """
    if not sequences or inputs.budget is None or not is_compiled(inputs.problem.sync):
        return None, 0
    now, found = _seconds(inputs.problem, sequences), []
    longest = max(int(each.length_tokens.max()) for each in sequences)
    for flags, problem in _settings_to_try(request, inputs):
        if longest <= problem.num_ranks * problem.tokens_per_rank:
            factor = _seconds(problem, sequences) / now
            tokens = problem.tokens_per_rank
            found.append(Remedy(flags=flags, factor=factor, tokens_per_rank=tokens, steps=len(sequences)))
    best = min(found, key=lambda remedy: remedy.factor, default=None)
    return (best if best is not None and best.factor <= 1.0 - _LEAST_GAIN else None), len(found)


def enough_ranks(problem: Problem, sequences: Sequence[LengthTable]) -> int | None:
    """Return the fewest ranks, by halving, with which steps take as long as now; None if half are too few.

    Args:
        problem: of the plan; the token budget of its ranks stays.
        sequences: a few of its global batches.
    """
    is_plain = problem.pipeline is None and problem.encoder_balance is None and problem.rank_speeds is None
    if not sequences or not is_plain or problem.pipeline_parallel > 1 or not is_compiled(problem.sync):
        return None
    most, longest = _AS_LONG * _seconds(problem, sequences), max(int(each.length_tokens.max()) for each in sequences)
    found, ranks = None, problem.num_ranks
    while ranks % 2 == 0:
        ranks //= 2
        fewer = replace(problem, num_ranks=ranks, ranks_per_node=min(problem.ranks_per_node, ranks))
        if longest > ranks * problem.tokens_per_rank or _seconds(fewer, sequences) > most:
            break
        found = ranks
    return found


def _seconds(problem: Problem, sequences: Sequence[LengthTable]) -> float:
    solver = solver_of(problem)
    batches = [batch_of(each, problem) for each in sequences]
    return sum(makespan_seconds(solver.assign(batch), batch, problem) for batch in batches)


def _settings_to_try(request: PlanRequest, inputs: PlanInputs) -> Iterator[tuple[str, Problem]]:
    """Yield each setting that differs from the plan's and fits, with its flags, unless it cannot be priced."""
    for flags, changed in _changes(request, inputs.problem):
        by_itself = _fitting(changed, inputs)
        for sync in _SYNCS:
            problem = _fitting(replace(changed, sync=sync), inputs)
            if problem is None or problem == inputs.problem or not is_compiled(sync):
                continue
            told = [*flags, *([] if problem == by_itself else [f"--sync {sync}"])]
            if request.tokens_per_rank is not None:
                told.append(f"--tokens-per-rank {problem.tokens_per_rank}")
            if told:
                yield " ".join(told), problem


def _changes(request: PlanRequest, now: Problem) -> Iterator[tuple[list[str], PlanRequest]]:
    """Yield the request for each way to recompute, with as many tokens a rank as then fit."""
    open_ = replace(request, tokens_per_rank=None)
    if now.recipe is None:
        yield [], open_
        return
    for recompute in get_args(Recompute):
        changed = replace(open_, recipe=replace(request.recipe, recompute=recompute))
        is_typed_or_now = recompute in (now.recipe.recompute, request.recipe.recompute)
        yield [] if is_typed_or_now else [f"--recompute {recompute}"], changed


def _fitting(request: PlanRequest, inputs: PlanInputs) -> Problem | None:
    try:
        return problem_under(request, inputs)
    except FcpError:
        return None
