"""`megatron-dynamic-cp`: the hybrid (dynamic) context parallelism of Megatron-LM.

The rounds are those of megatron-core's scheduler (`megatron_rounds`); a test compares them with the original. Choices
that it leaves open are made per step, by predicted time:

- `--max-seqlen-per-dp-cp-rank` is the token budget or its half, quarter or eighth; smaller ones shard sequences more.
- Each sequence is a separate pack, as in megatron-core 0.16, or the sequences of a group in a round are packed up to
  the token budget. The development branch, whose choice of groups accounts for packing, is `megatron_packing`.
- In the original, rounds end with a barrier; here there is none under `iteration`. Under `microbatch`, a wave has one
  micro-batch per rank, so a round with several becomes several waves, a cost that the original does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fcp_cli.errors import PlanError
from fcp_cli.planning.baselines.drafts import Draft, FunctionSolver, assignment_of, packs_of, quickest, shard_sizes
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.planning.published.megatron_rounds import Group, balanced_rounds, degree_needed


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
