"""`megatron-packing`: the packing-aware dynamic context parallelism of Megatron-LM's development branch.

Written from the behaviour of `DefaultDynamicCPScheduler` there (`megatron/core/datasets`, 2026). Its rules:

- Sequences are taken longest first. Work is length² / ranks, and degrees are powers of two.
- A micro-batch of all ranks starts with the longest sequence on the smallest degree that holds it. Each other sequence
  goes where the most loaded rank stays lowest: into an open group with room of its degree or wider, or into a new group
  on free ranks. It waits for a later micro-batch if a rank would exceed 1.05 x longest x budget.
- If ranks stay empty, the first of the smallest groups is doubled repeatedly. If that cannot fill every rank, the
  micro-batch becomes a single group of all ranks, filled longest first.

The sequences of a group are one pack. As for `megatron-dynamic-cp`, two choices favour it: the budget that determines
the degrees is halved up to three times, with the fastest kept for every step, and no barrier follows under `iteration`.

`megatron-any-degree`: the same with unrounded degrees (NVIDIA/Megatron-LM#6801). Only the pull request's description
and tests were available, not the code of its scheduler. They say that a sequence needs just as many ranks as hold it
(three or five as well as four), and that groups are contiguous. If rounding up leaves no room, as for three sequences
that need three of eight ranks each, the micro-batch still becomes a single group of all ranks. They do not say which
wider degrees a sequence may get, or how groups grow into empty ranks. Two readings are tried, with the faster kept for
every step: the needed degree and its doublings, as before the change, or every degree from the needed one on. The order
of ranks in a ring, which limits a rank to four peers, is that of every plan (`plan/rings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from fcp_cli.planning.batches import GlobalBatches
from fcp_cli.planning.drafts import Draft, FunctionSolver
from fcp_cli.planning.problem import Batch, Problem
from fcp_cli.planning.strategies.megatron_dynamic_cp import (
    Group,
    degree_needed,
    drafts_of,
    packed,
    ranks_needed,
    solver_of,
)

_CAP = 1.05  # x longest x budget: largest work of a rank in a micro-batch


@dataclass(frozen=True, slots=True)
class Degrees:
    """A rule for the degrees that a sequence may get.

    Attributes:
        needed: (length, tokens per rank) -> least degree.
        wider: degree -> next wider one; groups also grow by it into empty ranks.
    """

    needed: Callable[[int, int], int]
    wider: Callable[[int], int]


def doubled(degree: int) -> int:
    return 2 * degree


POWERS_OF_TWO = Degrees(degree_needed, doubled)
DOUBLINGS = Degrees(ranks_needed, doubled)
EVERY = Degrees(ranks_needed, lambda degree: degree + 1)


@lru_cache(maxsize=1024)
def _offered(degrees: Degrees, degree: int, num_ranks: int) -> npt.NDArray[np.bool_]:
    """Return [num_ranks + 1] whether a sequence that needs `degree` ranks may get each degree."""
    offered = np.zeros(num_ranks + 1, dtype=np.bool_)
    while degree <= num_ranks:
        offered[degree] = True
        degree = degrees.wider(degree)
    return offered


def make_solver(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver for these batches."""
    return _solver("megatron-packing", batches.problem, POWERS_OF_TWO)


def make_any_degree(batches: GlobalBatches) -> FunctionSolver:
    """Make the solver with degrees that are not rounded to powers of two."""
    return _solver("megatron-any-degree", batches.problem, DOUBLINGS, EVERY)


def _solver(name: str, problem: Problem, *offered: Degrees) -> FunctionSolver:
    return solver_of(name, problem, needed=offered[0].needed, drafts=partial(_drafts, offered=offered))


def _drafts(
    batch: Batch, problem: Problem, tokens_per_rank: int, *, offered: Sequence[Degrees]
) -> Iterator[Iterator[Draft]]:
    for degrees in offered:
        rounds = packed_rounds(
            batch.lengths.tolist(), max_tokens_per_rank=tokens_per_rank, num_ranks=problem.num_ranks, degrees=degrees
        )
        yield drafts_of(rounds, partial(packed, batch, problem))


def packed_rounds(
    lengths: Sequence[int], *, max_tokens_per_rank: int, num_ranks: int, degrees: Degrees = POWERS_OF_TWO
) -> list[list[Group]]:
    """Schedule sequences into micro-batches of all ranks.

    Args:
        lengths: tokens of each sequence; none may need more than `num_ranks` ranks.
        max_tokens_per_rank: token budget of a rank in a micro-batch, over all sequences of its group.
        num_ranks: number of ranks.
        degrees: rule for the degrees that a sequence may get.

    Returns:
        The groups of each micro-batch, on contiguous ranks from rank 0 on, in order.
    """
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds = []
    while left:
        current = _PackingRound(lengths, left, max_tokens_per_rank, num_ranks, degrees)
        rounds.append(current.groups)
        left = current.left
    return rounds


class _PackingRound:
    """One micro-batch of all ranks: its groups, and the sequences left for later ones."""

    def __init__(
        self, lengths: Sequence[int], waiting: Sequence[int], held_tokens: int, num_ranks: int, degrees: Degrees
    ) -> None:
        self.groups: list[Group] = []
        self.left: list[int] = []
        self._lengths, self._held_tokens, self._num_ranks, self._degrees = lengths, held_tokens, num_ranks, degrees
        self._degree = np.zeros(num_ranks, dtype=np.int64)
        self._load, self._held = np.zeros(num_ranks), np.zeros(num_ranks)  # [groups] per rank of the group
        self._free_ranks, self._highest = num_ranks, 0.0
        self._cap = lengths[waiting[0]] * held_tokens * _CAP
        self._open(waiting[0], degrees.needed(lengths[waiting[0]], held_tokens))
        for i in waiting[1:]:
            self._place(i)
        self._fill_empty_ranks(waiting)

    def _place(self, i: int) -> None:
        """Put sequence i into the open or new group that keeps the highest load lowest, or leave it for later."""
        length, count = self._lengths[i], len(self.groups)
        offered = _offered(self._degrees, self._degrees.needed(length, self._held_tokens), self._num_ranks)
        new = np.flatnonzero(offered[: self._free_ranks + 1])
        degree = np.concatenate([self._degree[:count], new])
        load = np.maximum(np.append(self._load[:count], np.zeros(len(new))) + length * length / degree, self._highest)
        joins = offered[degree[:count]] & (self._held[:count] + length / degree[:count] <= self._held_tokens)
        load[:count][~joins] = np.inf
        if load.min(initial=np.inf) > self._cap:
            self.left.append(i)
            return
        least = np.flatnonzero(load == load.min())
        chosen = int(least[np.argmin(degree[least])])  # ties: the smallest degree, then an open group before a new one
        if chosen < count:
            self._add(i, chosen)
        else:
            self._open(i, int(degree[chosen]))

    def _open(self, i: int, degree: int) -> None:
        self._free_ranks -= degree
        self._degree[len(self.groups)] = degree
        self.groups.append(Group(degree))
        self._add(i, len(self.groups) - 1)

    def _add(self, i: int, number: int) -> None:
        group, length = self.groups[number], self._lengths[i]
        group.sequences.append(i)
        self._held[number] += length / group.degree
        self._load[number] += length * length / group.degree
        self._highest = max(self._highest, float(self._load[number]))

    def _fill_empty_ranks(self, waiting: Sequence[int]) -> None:
        """Widen the first of the smallest groups until no rank is empty; fall back to a single group of all ranks."""
        while self._free_ranks:
            smallest = min(self.groups, key=lambda group: group.degree)
            more = min(self._degrees.wider(smallest.degree), self._num_ranks) - smallest.degree
            if more > self._free_ranks:
                self._run_on_all_ranks(waiting)
                return
            self._free_ranks -= more
            smallest.degree += more

    def _run_on_all_ranks(self, waiting: Sequence[int]) -> None:
        everyone, held = Group(self._num_ranks), 0.0
        self.groups, self.left = [everyone], []
        for i in waiting:
            share = self._lengths[i] / self._num_ranks
            if held + share <= self._held_tokens:
                everyone.sequences.append(i)
                held += share
            else:
                self.left.append(i)
