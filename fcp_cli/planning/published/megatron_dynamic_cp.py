"""`megatron-dynamic-cp`: the hybrid (dynamic) context parallelism of Megatron-LM.

The rounds are those of megatron-core's scheduler (`megatron_rounds`), which a test compares with the original. Choices
that it leaves open favour it, per step by predicted time:

- `--max-seqlen-per-dp-cp-rank` is the token budget or its half, quarter or eighth, which shards long sequences more.
- Each sequence is a pack by itself, as in megatron-core 0.16, or the sequences of a group in a round are packed up to
  the token budget. The development branch, which packs, chooses groups by it, too: `megatron_packing`.
- Rounds end with a barrier there. Under `iteration` there is none here; under `microbatch` a wave may hold one
  micro-batch per rank, so that a round of several becomes several waves, which the original does not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fcp_cli.errors import PlanError
from fcp_cli.planning.baselines.drafts import Draft, assign, packs_of, quickest, shard_sizes
from fcp_cli.planning.batching.batches import GlobalBatches
from fcp_cli.planning.problem import Assignment, Batch, Problem, Solver
from fcp_cli.planning.published.megatron_rounds import Group, balanced_rounds, degree_needed


def make_solver(batches: GlobalBatches) -> Solver:
    """Make the solver for these batches."""
    return MegatronDynamicCP(batches.problem)


class MegatronDynamicCP:
    name: str = "megatron-dynamic-cp"
    options: Mapping[str, Any] = {}

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def assign(self, batch: Batch) -> Assignment:
        """Schedule one batch.

        Raises:
            PlanError: a sequence needs more ranks than there are, rounded up to a degree of the strategy.
        """
        return quickest(self._candidates(batch), batch, self._problem)

    def _candidates(self, batch: Batch) -> Iterator[Assignment]:
        problem, lengths = self._problem, batch.lengths.tolist()
        self._check_fits(max(lengths))
        for tokens_per_rank in shard_sizes(problem.tokens_per_rank):
            if self._needed(max(lengths), tokens_per_rank) > problem.num_ranks:
                return
            for drafts in self._drafts(batch, lengths, tokens_per_rank):
                yield assign(list(drafts), problem.sync)

    def _drafts(self, batch: Batch, lengths: list[int], tokens_per_rank: int) -> Iterator[Iterator[Draft]]:
        """Yield the ways to run the rounds of one token budget."""
        problem = self._problem
        rounds = balanced_rounds(lengths, max_tokens_per_rank=tokens_per_rank, num_ranks=problem.num_ranks)
        yield drafts_of(rounds, _alone)
        yield drafts_of(rounds, partial(packed, batch, problem))

    def _needed(self, length_tokens: int, max_tokens_per_rank: int) -> int:
        return degree_needed(length_tokens, max_tokens_per_rank)

    def _check_fits(self, longest: int) -> None:
        """Refuse a sequence that no degree of the strategy can hold."""
        problem = self._problem
        degree = self._needed(longest, problem.tokens_per_rank)
        if degree > problem.num_ranks:
            raise PlanError(
                f"{self.name} cannot plan a sequence of {longest} tokens: its degrees are powers of two, "
                f"{degree} ranks of {problem.tokens_per_rank} tokens are needed and there are {problem.num_ranks}"
            )


def drafts_of(rounds: Sequence[Sequence[Group]], split: Callable[[Group], list[list[int]]]) -> Iterator[Draft]:
    """Yield micro-batches round by round; `split` makes a group's sequences into packs."""
    for groups in rounds:
        first = 0
        for group in groups:
            ranks = range(first, first + group.degree)
            first += group.degree
            for pack in split(group):
                yield Draft(ranks, pack)


def _alone(group: Group) -> list[list[int]]:
    return [[sequence] for sequence in group.sequences]


def packed(batch: Batch, problem: Problem, group: Group) -> list[list[int]]:
    """Return a group's sequences in as few packs as its ranks hold."""
    return packs_of(group.sequences, batch, problem, group.degree)
