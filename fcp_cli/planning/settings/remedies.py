"""Remedies that shorten steps more than any plan can: a larger token budget, other recomputation, another sync."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, get_args

from fcp_cli.console import Assumptions
from fcp_cli.errors import FcpError
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.plan.pricing.setup import RankShape
from fcp_cli.planning.fcp.solver import is_compiled
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.settings.budget import profiled_budget, unfixed_request
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.planning.settings.problem_settings import computed_basis, problem_from
from fcp_cli.planning.settings.recipe_search import sampled_seconds
from fcp_cli.planning.settings.settings import PlanInputs
from fcp_cli.recipe import flag_words
from fcp_cli.validation import fields_of

_LEAST_GAIN: Final = 0.02  # smaller ones are within the cost model's error
_AS_LONG: Final = 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """A setting under which the same sequences would take less time.

    Attributes:
        flags: the flags of `fcp plan`, in addition to the given ones.
        factor: predicted seconds of fcp under it / of fcp as it was asked for.
        steps: the steps that this was computed on.
    """

    flags: str
    factor: float
    tokens_per_rank: int
    steps: int


def best_remedy(
    request: PlanRequest, inputs: PlanInputs, sequences: Sequence[LengthTable]
) -> tuple[Remedy | None, int]:
    """Return the settings that would help most, and how many were tried.

    Args:
        sequences: a few of its global batches, which are planned again under each setting.

    Returns:
        None as remedy if nothing that was tried is quicker by 2 %; 0 tried if nothing could be.
    """
    if not sequences or inputs.budget is None or not is_compiled(inputs.problem.sync):
        return None, 0
    longest = max(int(each.length_tokens.max()) for each in sequences)
    now, found = sampled_seconds(inputs.problem, sequences), []
    for problem in _problems_to_try(request, inputs):
        if longest <= problem.num_ranks * problem.tokens_per_rank and (flags := _flags(request, inputs, problem)):
            factor = sampled_seconds(problem, sequences) / now
            tokens = problem.tokens_per_rank
            found.append(Remedy(flags=flags, factor=factor, tokens_per_rank=tokens, steps=len(sequences)))
    best = min(found, key=lambda remedy: remedy.factor, default=None)
    tried = max(inputs.budget.tried, len(found))
    return (best if best is not None and best.factor <= 1.0 - _LEAST_GAIN else None), tried


def enough_ranks(problem: Problem, sequences: Sequence[LengthTable]) -> int | None:
    """Return the fewest ranks, by halving, with which steps take as long as now; None if half are too few.

    Args:
        problem: the problem of the plan; the token budget of its ranks stays.
        sequences: a few of its global batches.
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


def _problems_to_try(request: PlanRequest, inputs: PlanInputs) -> Iterator[Problem]:
    """Yield the problem under the quickest recipe of all; under a profile, whose times are of its recipe, each sync."""
    assert inputs.budget is not None
    open_ = replace(request, tokens_per_rank=None, sync=None, recipe=unfixed_request(request.recipe))
    if inputs.budget.cluster is not None:
        requests = [] if inputs.budget.tried and open_ == request else [open_]
    else:
        requests = [replace(open_, sync=sync) for sync in get_args(Sync)]
    for changed in requests:
        with suppress(FcpError):  # it does not fit, or has other times than the profile's
            problem = problem_under(changed, inputs)
            if problem != inputs.problem and is_compiled(problem.sync):
                yield problem


def _flags(request: PlanRequest, inputs: PlanInputs, problem: Problem) -> str:
    """Return the options that lead from a plan's problem to another one."""
    now, then, words = inputs.problem.recipe, problem.recipe, []
    if now is not None and then is not None:
        names = ["zero_stage", "recompute", "offload", *(["reduce"] if then.zero_stage == 3 else [])]
        for name in (name for name in names if getattr(now, name) != getattr(then, name)):
            words += flag_words(name, getattr(then, name))
        if now.shards(problem.num_ranks) != (shards := then.shards(problem.num_ranks)):
            words += ["--shard-ranks", str(shards)]
    words += [] if problem.sync == inputs.problem.sync else ["--sync", problem.sync]
    words += [] if request.tokens_per_rank is None else ["--tokens-per-rank", str(problem.tokens_per_rank)]
    return " ".join(words)


def problem_under(request: PlanRequest, inputs: PlanInputs) -> Problem:
    """Return the problem of the same ranks under another request: other recipe, sync or token budget.

    Without a profile, the recipe is the quickest that the request allows on the plan's own data.

    Args:
        request: the request with the changes.
        inputs: the inputs of the plan, which `resolve` made.
    """
    now, assumptions = inputs.problem, Assumptions()
    known = inputs.budget
    most_peers = known.room.place.most_peers if known and known.room else None
    ranks = JobRanks(**fields_of(RankShape, now), virtual_stages=now.virtual_stages, most_peers=most_peers)
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
    basis = computed_basis(request, assumptions, cluster=known.cluster, most_peers=ranks.most_peers, data=inputs.data)
    return problem_from(request, *basis, assumptions)
