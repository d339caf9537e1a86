"""Changes of settings that make steps faster than planning alone can: token budget, recomputation, sync, ranks."""

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


def best_remedy(
    request: PlanRequest, inputs: PlanInputs, sequences: Sequence[LengthTable]
) -> tuple[Remedy | None, int]:
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
    for problem in _problems_to_try(request, inputs):
        if longest <= problem.num_ranks * problem.tokens_per_rank and (flags := _flags(request, inputs, problem)):
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


def _problems_to_try(request: PlanRequest, inputs: PlanInputs) -> Iterator[Problem]:
    """Yield the problem under the fastest recipe; with a given profile, which fixes the recipe, one for each sync."""
    assert inputs.budget is not None
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


def _flags(request: PlanRequest, inputs: PlanInputs, problem: Problem) -> str:
    """Return the options that change a plan's problem to another one."""
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
    """Return the problem of the same ranks under a request with another recipe, sync or token budget.

    Without a given profile, the recipe is the fastest that the request allows on the plan's data.

    Args:
        request: changed request.
        inputs: inputs of the plan, from `resolve`.
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
