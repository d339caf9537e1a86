"""`karmarkar-karp`: one degree for all, and number partitioning over the data-parallel ranks, as slime and verl do.

slime (2026) packs sequences by tokens, first-fit in their order, splits the largest packs in two until all
data-parallel ranks get equally many, and spreads them (`split`). Older versions packed first-fit decreasing and left
the last round short (`packs`). verl spreads the sequences, then those of each rank over its micro-batches
(`sequences`). All balance with the largest differencing method. Choices that they leave open favour them:

- The weights are seconds of the cost profile. slime and verl may exceed the token budget when they balance by work;
  here the budget always holds, and a rank runs more micro-batches instead.
- The degree (any divisor of the ranks) and one of the three variants are fixed for the plan, by predicted time over a
  sample of its steps.
- A data-parallel rank runs its micro-batches in falling order of time, so that waves are even.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import partial
from itertools import product, zip_longest
from typing import Literal, TypeAlias, get_args

import numpy as np

from fcp_cli.cost.model import Work, group_seconds
from fcp_cli.plan.pricing import pack_work
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import (
    Draft,
    FunctionSolver,
    assignment_of,
    first_fit,
    members_by_pack,
    packs_of,
    partition,
    quickest_solver,
)
from fcp_cli.planning.problem import Assignment, Batch, Problem, work_on
from fcp_cli.planning.static import holding_degrees
from fcp_cli.util.arrays import FloatArray, IntArray

Balance: TypeAlias = Literal["packs", "split", "sequences"]  # older slime, slime, verl


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver with the fastest degree and variant over a sample of the steps."""
    settings = product(holding_degrees(batches), get_args(Balance))
    return quickest_solver((solver_of(batches.problem, *setting) for setting in settings), batches)


def solver_of(problem: Problem, degree: int, balance: Balance) -> FunctionSolver:
    """Make the solver for one degree and one variant."""
    rule = partial(_spread, degree=degree, balance=balance)
    options = {"degree": degree, "balance": balance}
    return FunctionSolver(name="karmarkar-karp", problem=problem, rule=rule, options=options)


def _spread(batch: Batch, problem: Problem, *, degree: int, balance: Balance) -> Assignment:
    """Spread one batch over the data-parallel ranks."""
    parts = problem.num_ranks // degree
    if balance == "sequences":
        packs_of_rank = _balance_sequences(batch, problem, degree, parts)
    else:  # slime makes packs first
        packs = (
            _split_packs(batch, problem, degree, parts)
            if balance == "split"
            else packs_of(range(len(batch.lengths)), batch, problem, degree)
        )
        weights = _pack_seconds(packs, batch, problem, degree).tolist()
        packs_of_rank = [[packs[i] for i in part] for part in partition(weights, parts, equal_counts=True)]
    slowest_first = [
        [packs[i] for i in np.argsort(-_pack_seconds(packs, batch, problem, degree), kind="stable").tolist()]
        for packs in packs_of_rank
    ]
    drafts = [
        Draft(range(rank * degree, (rank + 1) * degree), pack)
        for turn in zip_longest(*slowest_first)
        for rank, pack in enumerate(turn)
        if pack
    ]
    return assignment_of(drafts, problem.sync)


def _split_packs(batch: Batch, problem: Problem, degree: int, parts: int) -> list[list[int]]:
    """Pack first-fit, then halve the packs with the most tokens until their number divides among the ranks."""
    tokens = work_on(batch.work, degree, problem).tokens
    pack_of = first_fit(tokens, degree * problem.tokens_per_rank)
    offsets, members = members_by_pack(pack_of, int(pack_of.max()) + 1)
    packs = [part.tolist() for part in np.split(members, offsets[1:-1])]
    heap = [(-int(tokens[pack].sum()), -i) for i, pack in enumerate(packs) if len(pack) > 1]
    heapq.heapify(heap)
    while len(packs) % parts and heap:
        fullest = -heapq.heappop(heap)[1]
        halves = _halved(packs[fullest], tokens)
        packs[fullest] = halves[0]
        packs.append(halves[1])
        for i in (fullest, len(packs) - 1):
            if len(packs[i]) > 1:
                heapq.heappush(heap, (-int(tokens[packs[i]].sum()), -i))
    return packs


def _balance_sequences(batch: Batch, problem: Problem, degree: int, parts: int) -> list[list[list[int]]]:
    """Balance like verl: sequences over ranks, then each rank's over as many micro-batches as the fullest one needs."""
    work, limit = work_on(batch.work, degree, problem), degree * problem.tokens_per_rank
    shares = partition(work.total_seconds.tolist(), parts)
    count = max(-(-int(work.tokens[share].sum()) // limit) for share in shares)
    return [_split(share, count, work, limit) for share in shares]


def _split(members: Sequence[int], count: int, work: Work, limit: int) -> list[list[int]]:
    """Split a rank's sequences into at least `count` micro-batches of similar time, each within the token budget."""
    weights = work.total_seconds[members].tolist()
    lengths = work.tokens[members].tolist()
    while True:
        parts = [part for part in partition(weights, count) if part]
        if all(sum(lengths[i] for i in part) <= limit for part in parts):
            return [[members[i] for i in part] for part in parts]
        count += 1


def _pack_seconds(packs: Sequence[list[int]], batch: Batch, problem: Problem, degree: int) -> FloatArray:
    if not packs:
        return np.empty(0)
    offsets = np.cumsum([0, *(len(pack) for pack in packs)])
    work = pack_work(batch.work.take(np.concatenate(packs)), offsets, degree, problem.profile, problem.padding_multiple)
    # If the degree does not divide a node, some groups cross nodes: weigh packs as if all did.
    return group_seconds(problem.profile, work, degree=degree, crosses_nodes=problem.ranks_per_node % degree != 0)


def _halved(members: Sequence[int], tokens: IntArray) -> tuple[list[int], list[int]]:
    """Split a pack in two, longest sequence first, each to the half with fewer tokens."""
    halves: tuple[list[int], list[int]] = ([], [])
    for i in sorted(members, key=lambda i: -int(tokens[i])):
        halves[int(tokens[halves[0]].sum() > tokens[halves[1]].sum())].append(i)
    return halves
