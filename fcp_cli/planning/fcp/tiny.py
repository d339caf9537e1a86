"""Exact search for tiny steps: few sequences on few ranks, with every possible wave tried.

Waves serve both syncs: on 4 to 16 ranks an exact search of timelines gained nothing more on any family of lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, product
from typing import TypeAlias

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.plan.pricing.packs import PlacedPacks, microbatch_prices, pack_work
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.problem import Assignment, Batch, Problem

_CHOICES = 1700  # packs x choices of ranks for each; a step of that many takes some hundredths of a second
_INSIDE, _ACROSS = 0, 1

_Groups: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]  # of a wave: (mask of sequences, ranks used per node)


def is_tiny(batch: Batch, problem: Problem) -> bool:
    """Return whether an exact search is affordable, e.g. 7 sequences on a node of 8 ranks, or 6 on two nodes of 4."""
    if len(batch.rows) > 10:  # never affordable, and 2^n of a large batch is a huge integer
        return False
    return bool(2 ** len(batch.rows) * math.prod(size + 1 for size in _node_sizes(problem)) <= _CHOICES)


def assign_tiny(batch: Batch, problem: Problem) -> Assignment:
    """Return the fastest step of waves; under `iteration` all its wave numbers are -1.

    Args:
        batch: a batch of few sequences; see `is_tiny`.
        problem: the problem, without limits on rings.
    """
    seconds, sizes = _prices(batch, problem).tolist(), _node_sizes(problem)
    floor = problem.profile.step.floor_seconds(problem.sync)

    @cache
    def wave(mask: int, free: tuple[int, ...]) -> tuple[float, _Groups]:
        """Return the fastest wave for the sequences of `mask` on the free ranks of each node."""
        best: tuple[float, _Groups] = (math.inf, ())
        for pack, counts in product(_parts(mask), product(*(range(ranks + 1) for ranks in free))):
            own = seconds[pack][sum(counts)][_ACROSS if sum(map(bool, counts)) > 1 else _INSIDE]
            # The wave lasts at least as long as this pack: no need to solve the rest.
            if own < best[0]:
                left = tuple(ranks - count for ranks, count in zip(free, counts, strict=True))
                others, groups = wave(mask ^ pack, left) if mask ^ pack else (0.0, ())
                best = min(best, (max(own, others), ((pack, counts), *groups)), key=lambda one: one[0])
        return best

    @cache
    def step(mask: int) -> tuple[float, tuple[_Groups, ...]]:
        """Return the fastest waves for the sequences of `mask`; the first wave runs the first sequence."""
        if not mask:
            return 0.0, ()
        waves = ((part, *wave(part, sizes)) for part in _parts(mask))
        found = (
            (max(floor, own) + step(mask ^ part)[0], (groups, *step(mask ^ part)[1])) for part, own, groups in waves
        )
        return min(found, key=lambda one: one[0])

    return _assignment(step(2 ** len(batch.rows) - 1)[1], sizes, are_numbered=problem.sync == "microbatch")


def _parts(mask: int) -> Iterator[int]:
    """Yield the subsets of a mask that contain its lowest bit."""
    low, part = mask & -mask, mask
    while part:
        if part & low:
            yield part
        part = (part - 1) & mask


def _node_sizes(problem: Problem) -> tuple[int, ...]:
    """Return the ranks of each node; nodes of one rank count as a single node whose rings are priced across nodes."""
    per_node = problem.num_ranks if problem.ranks_per_node == 1 else problem.ranks_per_node
    return tuple(min(per_node, problem.num_ranks - first) for first in range(0, problem.num_ranks, per_node))


def _prices(batch: Batch, problem: Problem) -> FloatArray:
    """Return [2^n, ranks + 1, 2] seconds of each mask's sequences by degree, inside a node and across nodes."""
    ranks, per_node, sequences = problem.num_ranks, problem.ranks_per_node, len(batch.rows)
    groups = [(degree, _INSIDE, range(degree)) for degree in range(1, min(per_node, ranks) + 1)]
    if per_node < ranks:
        # At least one rank on the second node.
        firsts = [(degree, max(0, per_node - degree + 1)) for degree in range(2, ranks + 1)]
        groups += [(degree, _ACROSS, range(first, first + degree)) for degree, first in firsts]
    members = [[i for i in range(sequences) if mask >> i & 1] for mask in range(1, 2**sequences)]
    work, offsets = batch.work.take(np.concatenate(members)), offsets_of([len(pack) for pack in members])
    seconds, on_nodes = np.full((2**sequences, ranks + 1, 2), np.inf), replace(problem, ranks_per_node=per_node)
    for degree, place, group in groups:
        tokens = pack_work(work, offsets, degree, problem.profile, problem.padding_multiple).tokens
        # `_assignment` may split a group over nodes in another way, which only changes the price if ranks share heads.
        packs = PlacedPacks(
            work=work,
            offsets=offsets,
            rank_offsets=offsets_of([degree] * len(members)),
            ranks=np.tile(np.array(group, dtype=np.int32), len(members)),
        )
        priced = microbatch_prices(packs, on_nodes, problem.profile, heads=problem.attention).seconds
        seconds[1:, degree, place] = np.where(tokens <= degree * problem.tokens_per_rank, priced, np.inf)
    if per_node == 1:
        # Treated as one node (`_node_sizes`), but all messages cross nodes.
        seconds[:, 2:, _INSIDE] = seconds[:, 2:, _ACROSS]
    return seconds


def _assignment(waves: tuple[_Groups, ...], sizes: tuple[int, ...], *, are_numbered: bool) -> Assignment:
    """Return the assignment; each group of a wave gets the next free ranks of its nodes."""
    ranks, packs, numbers = [], [], []
    for number, groups in enumerate(waves):
        firsts = [0, *accumulate(sizes)]
        for mask, counts in groups:
            ranks.append(
                [rank for first, count in zip(firsts, counts, strict=False) for rank in range(first, first + count)]
            )
            firsts = [first + count for first, count in zip(firsts, counts, strict=False)]
            packs.append([i for i in range(mask.bit_length()) if mask >> i & 1])
            numbers.append(number if are_numbered else -1)
    return Assignment(
        wave=np.array(numbers, dtype=np.int32),
        rank_offsets=offsets_of([len(group) for group in ranks]),
        ranks=np.concatenate(ranks).astype(np.int32),
        member_offsets=offsets_of([len(pack) for pack in packs]),
        members=np.concatenate(packs),
    )
