"""`megatron-dynamic-cp`: the hybrid (dynamic) context parallelism of Megatron-LM.

The rounds are those of megatron-core's scheduler (`balanced_rounds`); a test compares them with the original. Choices
that it leaves open are made per step, by predicted time:

- `--max-seqlen-per-dp-cp-rank` is the token budget or its half, quarter or eighth; smaller ones shard sequences more.
- Each sequence is a separate pack, as in megatron-core 0.16, or the sequences of a group in a round are packed up to
  the token budget. The development branch, whose choice of groups accounts for packing, is `megatron_packing`.
- In the original, rounds end with a barrier; here there is none under `iteration`. Under `microbatch`, a wave has one
  micro-batch per rank, so a round with several becomes several waves, a cost that the original does not have.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from fcp_cli.errors import PlanError
from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import Draft, FunctionSolver, assignment_of, packs_of, quickest, shard_sizes
from fcp_cli.planning.problem import Assignment, Batch, Problem


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver for these batches."""
    return solver_of("megatron-dynamic-cp", batches.problem, needed=degree_needed, drafts=_drafts)


def solver_of(
    name: str,
    problem: Problem,
    *,
    needed: Callable[[int, int], int],
    drafts: Callable[[Batch, Problem, int], Iterator[Iterator[Draft]]],
) -> FunctionSolver:
    """Make a solver for one of Megatron's schedulers.

    Args:
        name: the name in the registry.
        problem: the problem to plan for.
        needed: (length, tokens per rank) -> least degree of a sequence.
        drafts: (batch, problem, tokens per rank) -> the ways to run the batch, each as micro-batches.
    """
    rule = partial(_scheduled, name=name, needed=needed, drafts=drafts)
    return FunctionSolver(name=name, problem=problem, rule=rule)


def _scheduled(
    batch: Batch,
    problem: Problem,
    *,
    name: str,
    needed: Callable[[int, int], int],
    drafts: Callable[[Batch, Problem, int], Iterator[Iterator[Draft]]],
) -> Assignment:
    """Schedule one batch; raise PlanError if a sequence needs too many ranks."""
    longest = int(batch.lengths.max())
    degree = needed(longest, problem.tokens_per_rank)
    if degree > problem.num_ranks:
        raise PlanError(
            f"{name} cannot plan a sequence of {longest} tokens: its degrees are powers of two, "
            f"{degree} ranks of {problem.tokens_per_rank} tokens are needed and there are {problem.num_ranks}"
        )
    able = [size for size in shard_sizes(problem.tokens_per_rank) if needed(longest, size) <= problem.num_ranks]
    found = (assignment_of(list(one), problem.sync) for size in able for one in drafts(batch, problem, size))
    return quickest(found, batch, problem)


def _drafts(batch: Batch, problem: Problem, tokens_per_rank: int) -> Iterator[Iterator[Draft]]:
    rounds = balanced_rounds(batch.lengths.tolist(), max_tokens_per_rank=tokens_per_rank, num_ranks=problem.num_ranks)
    yield drafts_of(rounds, lambda group: [[sequence] for sequence in group.sequences])
    yield drafts_of(rounds, partial(packed, batch, problem))


def drafts_of(rounds: Sequence[Sequence[Group]], split: Callable[[Group], list[list[int]]]) -> Iterator[Draft]:
    """Yield micro-batches round by round; `split` divides a group's sequences into packs."""
    for groups in rounds:
        first = 0
        for group in groups:
            ranks = range(first, first + group.degree)
            first += group.degree
            for pack in split(group):
                yield Draft(ranks, pack)


def packed(batch: Batch, problem: Problem, group: Group) -> list[list[int]]:
    """Pack a group's sequences first-fit decreasing, up to the budget of its ranks."""
    return packs_of(group.sequences, batch, problem, group.degree)


# The rounds of Megatron-LM's hybrid context parallelism (megatron-core 0.16, class `BalancedCPScheduler`).
#
# Written from the behaviour of that scheduler, but on groups instead of ranks. Its rules:
#
# - A sequence runs on the smallest power of two of ranks that holds it; its work is length² / ranks. - Sequences,
# longest first, are cut into runs of about equal work, as many as there are different degrees. - In a round, the next
# sequence is the head of the first run whose head can be placed: in a new group on free ranks, else in the least
# loaded group of exactly its degree. The round ends when nothing fits, or, once a smaller degree than the round's
# first was placed, when the loads of all ranks are within 5 %. - If no rank is empty, the most loaded group gives
# back its last sequence while that narrows the spread of the loads. Otherwise the first of the smallest groups is
# doubled repeatedly.

_SLACK = 0.05  # spread of the loads of a balanced round, relative to the largest
_RUN_OVERFULL = 1.1  # multiple of its fair share of work that a run may not exceed


@dataclass(slots=True)
class Group:
    """Contiguous ranks in a round, and their sequences; `load` is the work per rank."""

    degree: int
    load: float = 0.0
    sequences: list[int] = field(default_factory=list)


def ranks_needed(length_tokens: int, max_tokens_per_rank: int) -> int:
    """Return the fewest ranks that hold a sequence."""
    return -(-length_tokens // max_tokens_per_rank)


def degree_needed(length_tokens: int, max_tokens_per_rank: int) -> int:
    """Return the smallest power-of-two number of ranks that holds a sequence."""
    return 1 << (ranks_needed(length_tokens, max_tokens_per_rank) - 1).bit_length()


def balanced_rounds(lengths: Sequence[int], *, max_tokens_per_rank: int, num_ranks: int) -> list[list[Group]]:
    """Schedule sequences into rounds.

    Args:
        lengths: tokens of each sequence; none may need more than `num_ranks` ranks.
        max_tokens_per_rank: token budget, which only determines degrees: every sequence is a separate pack.
        num_ranks: number of ranks.

    Returns:
        The groups of each round, on contiguous ranks from rank 0 on, in order.
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
    """Cut tasks into runs of about equal work, one per distinct degree; reverse each, so that `pop` takes the head."""
    wanted = len({task.degree for task in tasks})
    target = sum(task.work for task in tasks) / wanted
    runs: list[list[_Task]] = []
    run: list[_Task] = []
    work = 0.0
    for i, task in enumerate(tasks):
        # The original counts closed runs twice when it reserves tasks for later runs; kept, since results depend on it.
        few_left = len(tasks) - i <= wanted - 2 * len(runs)
        if run and (work + task.work > target * _RUN_OVERFULL or few_left):
            runs.append(run[::-1])
            run, work = [], 0.0
        run.append(task)
        work += task.work
    return [*runs, run[::-1]]


class _Round:
    """Groups of a round under construction; all ranks of a group have the same load."""

    def __init__(self, num_ranks: int) -> None:
        self.groups: list[Group] = []
        self.free_ranks = num_ranks
        self._by_degree: dict[int, list[tuple[float, int]]] = {}  # heaps of (load, group)

    def place(self, runs: list[list[_Task]]) -> list[_Task]:
        """Place tasks until nothing fits or the loads are level; return the remaining tasks in order."""
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
        """Remove and return last tasks of the most loaded group while that narrows the spread of the loads."""
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
        """Double the first of the smallest groups while there are enough free ranks."""
        while self.free_ranks:
            smallest = min(self.groups, key=lambda group: group.degree)
            if smallest.degree > self.free_ranks:
                return  # only if the number of ranks is not a power of two; the original raises an error here
            self.free_ranks -= smallest.degree
            smallest.degree *= 2
