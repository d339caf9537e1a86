"""The rounds of Megatron-LM's hybrid context parallelism (megatron-core 0.16, class `BalancedCPScheduler`).

Written from the behaviour of that scheduler, on groups instead of ranks. Its rules:

- A sequence runs on the smallest power of two of ranks that holds it; its work is length² / ranks.
- Sequences, longest first, are cut into as many runs of about equal work as there are different degrees.
- In a round, the first run whose head can be placed gives the next sequence: to a new group on free ranks, else to
  the least loaded group of exactly its degree. The round ends when nothing fits, or, once a smaller degree than the
  round's first was placed, when all ranks have the same work to within 5 %.
- The most loaded group gives back its last sequence as long as that narrows the spread. If ranks stayed empty, the
first of the smallest groups is doubled repeatedly.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

_SLACK = 0.05  # of the largest load: tolerance of a balanced round
_RUN_OVERFULL = 1.1  # a run is closed before its work passes this multiple of its fair share


@dataclass(slots=True)
class Group:
    """Contiguous ranks of one round, and the sequences that they run one after the other."""

    degree: int
    load: float = 0.0
    sequences: list[int] = field(default_factory=list)


def ranks_needed(length_tokens: int, max_tokens_per_rank: int) -> int:
    """Return the fewest ranks that hold a sequence."""
    return -(-length_tokens // max_tokens_per_rank)


def degree_needed(length_tokens: int, max_tokens_per_rank: int) -> int:
    """Return the smallest power of two of ranks that holds a sequence."""
    return 1 << (ranks_needed(length_tokens, max_tokens_per_rank) - 1).bit_length()


def balanced_rounds(lengths: Sequence[int], *, max_tokens_per_rank: int, num_ranks: int) -> list[list[Group]]:
    """Schedule sequences.

    Args:
        lengths: tokens of each sequence; none may need more than `num_ranks` ranks.
        max_tokens_per_rank: gives the degrees; nothing else bounds memory, since every sequence is a pack by itself.
        num_ranks: ranks of the job.

    Returns:
        Per round its groups, on contiguous ranks from rank 0 on in the groups' order.
    """
    tasks = [_Task.of(i, length, max_tokens_per_rank) for i, length in enumerate(lengths)]
    assert all(task.degree <= num_ranks for task in tasks)
    left = sorted(tasks, key=lambda task: -task.length)
    rounds = []
    while left:
        current = _Round(num_ranks)
        left = current.place(_runs(left))
        left += current.give_back(tasks)
        current.fill_empty_ranks()
        rounds.append(current.groups)
    return rounds


@dataclass(frozen=True, slots=True)
class _Task:
    sequence: int
    length: int
    degree: int
    work: float

    @classmethod
    def of(cls, sequence: int, length: int, max_tokens_per_rank: int) -> _Task:
        degree = degree_needed(length, max_tokens_per_rank)
        return cls(sequence, length, degree, length * length / degree)


def _runs(tasks: Sequence[_Task]) -> list[list[_Task]]:
    """Cut into consecutive runs of about equal work, as many as there are degrees; the head of a run comes last."""
    wanted = len({task.degree for task in tasks})
    target = sum(task.work for task in tasks) / wanted
    runs: list[list[_Task]] = []
    run: list[_Task] = []
    work = 0.0
    for i, task in enumerate(tasks):
        # The original counts a closed run twice when it saves tasks for the runs to come; kept, it shapes the result.
        few_left = len(tasks) - i <= wanted - 2 * len(runs)
        if run and (work + task.work > target * _RUN_OVERFULL or few_left):
            runs.append(run[::-1])
            run, work = [], 0.0
        run.append(task)
        work += task.work
    return [*runs, run[::-1]]


class _Round:
    """Groups under construction. Members of a group always carry the same load."""

    def __init__(self, num_ranks: int) -> None:
        self.groups: list[Group] = []
        self.free_ranks = num_ranks
        self._by_degree: dict[int, list[tuple[float, int]]] = {}  # heaps of (load, group)

    def place(self, runs: list[list[_Task]]) -> list[_Task]:
        """Place tasks until nothing fits or the loads are level; returns the tasks left, in their order."""
        first_degree = 0
        may_stop = False
        while (run := next((run for run in runs if run and self._fits(run[-1].degree)), None)) is not None:
            task = run.pop()
            self._add(task)
            first_degree = first_degree or task.degree
            may_stop = may_stop or task.degree < first_degree
            if may_stop and self._is_level() and any(runs):
                break
        return [task for run in runs for task in reversed(run)]

    def _fits(self, degree: int) -> bool:
        return degree <= self.free_ranks or degree in self._by_degree

    def _add(self, task: _Task) -> None:
        heap = self._by_degree.setdefault(task.degree, [])
        if task.degree <= self.free_ranks:
            self.free_ranks -= task.degree
            number = len(self.groups)
            self.groups.append(Group(task.degree))
        else:
            number = heapq.heappop(heap)[1]
        group = self.groups[number]
        group.load += task.work
        group.sequences.append(task.sequence)
        heapq.heappush(heap, (group.load, number))

    def _is_level(self) -> bool:
        highest = max(group.load for group in self.groups)
        return highest - self._lowest() <= _SLACK * highest

    def _lowest(self) -> float:
        return 0.0 if self.free_ranks else min(heap[0][0] for heap in self._by_degree.values())

    def give_back(self, tasks: Sequence[_Task]) -> list[_Task]:
        """Take the last task from the most loaded group while that narrows the spread of the loads."""
        returned: list[_Task] = []
        while not self.free_ranks:
            loads = [group.load for group in self.groups]
            spread = max(loads) - min(loads)
            fullest = loads.index(max(loads))
            group = self.groups[fullest]
            if spread <= _SLACK * group.load or len(group.sequences) <= 1:
                break
            task = tasks[group.sequences[-1]]
            loads[fullest] -= task.work
            if max(loads) - min(loads) >= spread:
                break
            group.load = loads[fullest]
            returned.append(tasks[group.sequences.pop()])
        return returned

    def fill_empty_ranks(self) -> None:
        """Double the first of the smallest groups while there are ranks for it."""
        while self.free_ranks:
            smallest = min(self.groups, key=lambda group: group.degree)
            if smallest.degree > self.free_ranks:
                return  # only if the number of ranks is no power of two: the original stops with an error here
            self.free_ranks -= smallest.degree
            smallest.degree *= 2
