"""`karmarkar-karp`: one degree for all, and number partitioning over the data-parallel ranks, as slime and verl do.

slime packs sequences by tokens, first-fit in their order, splits the largest packs in two until each data-parallel rank
gets equally many (2026; `split`), and spreads them; older versions packed first-fit decreasing and left the last round
short (`packs`). verl spreads the sequences and then each rank's sequences over its micro-batches (`sequences`). All
balance with the largest differencing method. Choices that the paper leaves open favour it:

- The weights are the seconds of the cost profile. The token budget always holds: slime and verl may exceed it when
  they balance by work; here a rank takes more micro-batches instead.
- The degree (any divisor of the ranks) and which of the three runs are fixed for the plan, by predicted time over a
  sample of its steps.
- A data-parallel rank runs its micro-batches in descending order of time, so that waves match.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.cost.model import Work, group_seconds
from fcp_cli.planning.assemble import makespan_seconds
from fcp_cli.planning.baselines.drafts import Draft, assign, packs_of
from fcp_cli.planning.baselines.number_partition import partition
from fcp_cli.planning.baselines.packing import first_fit, members_by_pack
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.planning.work import pack_work, work_on

Balance: TypeAlias = Literal["packs", "split", "sequences"]  # slime twice, verl
_SAMPLED_STEPS = 4


def make_solver(batches: GlobalBatches) -> Solver:
    """Make the solver with the setting that is quickest over a sample of the steps."""
    problem = batches.problem
    steps = np.unique(np.linspace(0, len(batches) - 1, _SAMPLED_STEPS, dtype=np.int64)).tolist()
    sample = [batches.batch(step) for step in steps]
    longest = batches.longest_tokens
    solvers = (KarmarkarKarp(problem, *setting) for setting in feasible_settings(longest, problem))
    return min(solvers, key=lambda solver: solver.seconds(sample))


def feasible_settings(longest_tokens: int, problem: Problem) -> list[tuple[int, Balance]]:
    """Return every divisor of the ranks that holds the longest sequence (all ranks do), with each way to balance."""
    degrees = [
        degree
        for degree in range(1, problem.num_ranks + 1)
        if problem.num_ranks % degree == 0 and degree * problem.tokens_per_rank >= longest_tokens
    ]
    return [(degree, balance) for degree in degrees for balance in get_args(Balance)]


class KarmarkarKarp:
    name = "karmarkar-karp"

    def __init__(self, problem: Problem, degree: int, balance: Balance) -> None:
        self._problem, self._degree, self._balance = problem, degree, balance
        self._group_tokens = degree * problem.tokens_per_rank
        self.options: Mapping[str, Any] = {"degree": degree, "balance": balance}

    def assign(self, batch: Batch) -> Assignment:
        """Spread one batch over the data-parallel ranks."""
        balanced = self._balance_sequences if self._balance == "sequences" else self._balance_packs
        packs_of_rank = [self._slowest_first(packs, batch) for packs in balanced(batch)]
        drafts = [
            Draft(range(rank * self._degree, (rank + 1) * self._degree), pack)
            for turn in zip_longest(*packs_of_rank)
            for rank, pack in enumerate(turn)
            if pack
        ]
        return assign(drafts, self._problem.sync)

    def seconds(self, sample: Sequence[Batch]) -> float:
        """Predict the time of the sampled steps."""
        return sum(makespan_seconds(self.assign(batch), batch, self._problem) for batch in sample)

    @property
    def _data_parallel(self) -> int:
        return self._problem.num_ranks // self._degree

    def _balance_packs(self, batch: Batch) -> list[list[list[int]]]:
        """Balance as slime does: packs first."""
        if self._balance == "split":
            packs = self._split_packs(batch)
        else:
            packs = packs_of(range(len(batch.lengths)), batch, self._problem, self._degree)
        weights = self._pack_seconds(packs, batch).tolist()
        parts = partition(weights, self._data_parallel, equal_counts=True)
        return [[packs[i] for i in part] for part in parts]

    def _split_packs(self, batch: Batch) -> list[list[int]]:
        """Pack first-fit, then halve the packs with most tokens until every data-parallel rank gets equally many."""
        tokens = work_on(batch.work, self._degree, self._problem).tokens
        pack_of = first_fit(tokens, self._group_tokens)
        offsets, members = members_by_pack(pack_of, int(pack_of.max()) + 1)
        packs = [part.tolist() for part in np.split(members, offsets[1:-1])]
        heap = [(-int(tokens[pack].sum()), -i) for i, pack in enumerate(packs) if len(pack) > 1]
        heapq.heapify(heap)
        while len(packs) % self._data_parallel and heap:
            fullest = -heapq.heappop(heap)[1]
            halves = _halved(packs[fullest], tokens)
            packs[fullest] = halves[0]
            packs.append(halves[1])
            for i in (fullest, len(packs) - 1):
                if len(packs[i]) > 1:
                    heapq.heappush(heap, (-int(tokens[packs[i]].sum()), -i))
        return packs

    def _balance_sequences(self, batch: Batch) -> list[list[list[int]]]:
        """Balance as verl does: sequences first, then each rank's into as many micro-batches as the fullest needs."""
        work = work_on(batch.work, self._degree, self._problem)
        parts = partition(work.total_seconds.tolist(), self._data_parallel)
        tokens = [int(work.tokens[part].sum()) for part in parts]
        count = max(-(-total // self._group_tokens) for total in tokens)
        return [self._split(part, count, work) for part in parts]

    def _split(self, members: Sequence[int], count: int, work: Work) -> list[list[int]]:
        """Make at least `count` micro-batches of about equal time, each within the token budget."""
        weights = work.total_seconds[members].tolist()
        lengths = work.tokens[members].tolist()
        while True:
            parts = [part for part in partition(weights, count) if part]
            if all(sum(lengths[i] for i in part) <= self._group_tokens for part in parts):
                return [[members[i] for i in part] for part in parts]
            count += 1

    def _slowest_first(self, packs: Sequence[list[int]], batch: Batch) -> list[list[int]]:
        if not packs:
            return []
        return [packs[i] for i in np.argsort(-self._pack_seconds(packs, batch), kind="stable").tolist()]

    def _pack_seconds(self, packs: Sequence[list[int]], batch: Batch) -> FloatArray:
        members = np.concatenate(packs)
        offsets = np.cumsum([0, *(len(pack) for pack in packs)])
        work = pack_work(batch.work, members, offsets, self._degree, self._problem)
        return group_seconds(
            self._problem.profile,
            work,
            degree=self._degree,
            # If the degree does not divide a node, some groups lie across two: weigh packs as if all did.
            crosses_nodes=self._problem.ranks_per_node % self._degree != 0,
        )


def _halved(members: Sequence[int], tokens: IntArray) -> tuple[list[int], list[int]]:
    """Cut a pack in two, longest first to the half with fewer tokens."""
    halves: tuple[list[int], list[int]] = ([], [])
    for i in sorted(members, key=lambda i: -int(tokens[i])):
        halves[int(tokens[halves[0]].sum() > tokens[halves[1]].sum())].append(i)
    return halves
