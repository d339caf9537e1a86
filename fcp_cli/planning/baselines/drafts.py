"""Helpers of published strategies: micro-batches as plain lists, solvers made of a function, choice of the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import PlanError
from fcp_cli.plan.metadata.plan_metadata import Sync
from fcp_cli.plan.step import level_waves, offsets_of
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.packing import first_fit_decreasing
from fcp_cli.planning.baselines.placement import place_groups
from fcp_cli.planning.batching.batches import GlobalBatches, spread_steps
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.work import work_on


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionSolver:
    """A solver made of a function of the batch and the problem; see `problem.Solver`."""

    name: str
    problem: Problem
    rule: Callable[[Batch, Problem], Assignment]
    options: Mapping[str, Any] = field(default_factory=dict)

    def assign(self, batch: Batch) -> Assignment:
        """Plan one step."""
        return self.rule(batch, self.problem)

    def seconds(self, batch: Batch) -> float:
        """Predict the seconds of the step."""
        return makespan_seconds(self.assign(batch), batch, self.problem)


class _Timed(Protocol):
    def seconds(self, batch: Batch) -> float: ...


Packs: TypeAlias = Sequence[tuple[int, Sequence[int] | IntArray]]  # packs of a wave: (degree, members)
_Strategy = TypeVar("_Strategy", bound=_Timed)


def quickest_solver(solvers: Iterable[_Strategy], batches: GlobalBatches, *, steps: int = 4) -> _Strategy:
    """Return the solver with the least time over `steps` evenly spaced steps; the first on ties."""
    sample = [batches.batch(step) for step in spread_steps(len(batches), steps)]
    return min(solvers, key=lambda one: sum(map(one.seconds, sample)))


@dataclass(frozen=True, slots=True)
class Draft:
    """A micro-batch: its ranks, ascending, and its members as positions in the batch."""

    ranks: Sequence[int]
    members: Sequence[int] | IntArray


def assignment_of(drafts: Sequence[Draft], sync: Sync) -> Assignment:
    """Return an assignment in the order of the drafts; under `microbatch`, each in the first wave with free ranks."""
    return assign_waves(drafts, level_waves(draft.ranks for draft in drafts), sync)


def assign_waves(drafts: Sequence[Draft], waves: Sequence[int], sync: Sync) -> Assignment:
    """Return an assignment in the order of the drafts; under `microbatch` by these waves, from 0 without gaps."""
    if sync == "iteration":
        waves = [-1] * len(drafts)
    order = sorted(range(len(drafts)), key=waves.__getitem__)
    drafts = [drafts[i] for i in order]
    return Assignment(
        wave=np.array(sorted(waves), dtype=np.int32),
        rank_offsets=offsets_of([len(draft.ranks) for draft in drafts]),
        ranks=np.array([rank for draft in drafts for rank in draft.ranks], dtype=np.int32),
        member_offsets=offsets_of([len(draft.members) for draft in drafts]),
        members=np.array([member for draft in drafts for member in draft.members], dtype=np.int64),
    )


def place_waves(waves: Iterable[Packs], problem: Problem) -> Assignment:
    """Place the groups of each wave on disjoint ranks, inside a node if they fit.

    Every wave fills ranks from 0 on. Under `iteration` that does not balance the ranks' loads over the step; to do so,
    choose ranks and use `assignment_of`.
    """
    drafts, of_wave = [], []
    for wave, packs in enumerate(waves):
        offsets, ranks = place_groups(
            [degree for degree, _ in packs], num_ranks=problem.num_ranks, ranks_per_node=problem.ranks_per_node
        )
        groups = np.split(ranks, offsets[1:-1])
        drafts += [Draft(group.tolist(), members) for group, (_, members) in zip(groups, packs, strict=True)]
        of_wave += [wave] * len(packs)
    return assign_waves(drafts, of_wave, problem.sync)


def quickest(candidates: Iterable[Assignment], batch: Batch, problem: Problem) -> Assignment:
    """Return the candidate with the smallest makespan; the first on ties."""
    return min(candidates, key=lambda assignment: makespan_seconds(assignment, batch, problem))


def require_power_of_two(name: str, longest_tokens: int, problem: Problem) -> None:
    """Raise PlanError if a sequence needs more ranks than the largest power of two up to `num_ranks`."""
    largest = 1 << (problem.num_ranks.bit_length() - 1)
    held = largest * problem.tokens_per_rank
    if longest_tokens > held:
        raise PlanError(
            f"{name} cannot plan a sequence of {longest_tokens} tokens: its degrees are powers of two, and "
            f"{largest} ranks of {problem.tokens_per_rank} tokens hold {held}"
        )


def packs_of(members: Sequence[int], batch: Batch, problem: Problem, degree: int = 1) -> list[list[int]]:
    """Pack some of a batch's sequences first-fit decreasing, up to the budget of a group of `degree` ranks."""
    if not members:
        return []
    tokens = work_on(batch.work, degree, problem).tokens[members]
    pack_of = first_fit_decreasing(tokens, degree * problem.tokens_per_rank).tolist()
    packs: list[list[int]] = [[] for _ in range(max(pack_of) + 1)]
    for member, pack in zip(members, pack_of, strict=True):
        packs[pack].append(member)
    return packs


def shard_sizes(tokens_per_rank: int) -> list[int]:
    """Return the shard sizes that a strategy may tune: the token budget and its half, quarter and eighth."""
    return [size for size in (tokens_per_rank >> shift for shift in range(4)) if size]
