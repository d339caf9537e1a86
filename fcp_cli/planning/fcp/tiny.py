"""Plans tiny steps exactly: few sequences on few ranks, for which exhaustive search is affordable."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.plan.pricing.packs import PlacedPacks, microbatch_prices, pack_work
from fcp_cli.plan.step import offsets_of
from fcp_cli.planning.compiled import tiny
from fcp_cli.planning.compiled.tiny import ACROSS, INSIDE, Least, Nodes
from fcp_cli.planning.problem import Assignment, Batch, Problem

_CHOICES = 1700  # packs x choices of ranks for each; a step then takes some hundredths of a second
_BRANCHES = 5000  # micro-batches placed for one step, or one wave


class _MicroBatches(NamedTuple):
    """Result of a search: [microbatches] masks of sequences and starts, [microbatches, nodes] ranks of each node."""

    masks: IntArray
    starts: FloatArray
    counts: IntArray


def is_tiny(batch: Batch, problem: Problem) -> bool:
    """Return whether everything may be tried: for instance 7 sequences on a node of 8 ranks, or 6 on two of 4."""
    if len(batch.rows) > 10:  # before 2 to the power of it is worked out
        return False
    sizes = np.diff(_node_offsets(problem))
    return bool(2 ** len(batch.rows) * math.prod(int(size) + 1 for size in sizes) <= _CHOICES)


def assign_tiny(batch: Batch, problem: Problem, upper_seconds: float) -> Assignment | None:
    """Return the quickest step of all if it takes fewer than `upper_seconds`; the best that was seen if time ran out.

    Args:
        batch: the batch of few sequences; see `is_tiny`.
        problem: rings may use any ranks.
        upper_seconds: the seconds of a known step.
    """
    nodes = Nodes(_node_offsets(problem), _prices(batch, problem))
    if not nodes.seconds.min() > 0.0:
        return None  # work of no time could repeat forever
    terms = problem.profile.step
    upper_seconds -= terms.closing_seconds(problem.sync)
    least_of, everything = tiny.least(nodes), len(nodes.seconds) - 1
    if problem.sync == "iteration":
        found = _quickest(everything, upper_seconds, np.inf, nodes, least_of)
        return _assignment([found], nodes, are_numbered=False) if len(found.masks) else None
    masks, seconds = tiny.waves(terms.floor_seconds(problem.sync), _BRANCHES, nodes, least_of)
    if not seconds < upper_seconds:
        return None
    return _assignment([_quickest(mask, np.inf, 0.0, nodes, least_of) for mask in masks], nodes, are_numbered=True)


def _quickest(mask: int, upper_seconds: float, last_start: float, nodes: Nodes, least_of: Least) -> _MicroBatches:
    _seconds, *found, _whole = tiny.quickest(mask, upper_seconds, last_start, _BRANCHES, nodes, least_of)
    return _MicroBatches(*found)


def _node_offsets(problem: Problem) -> IntArray:
    """Return the first rank of each node; nodes of one rank count as one of all, whose rings cross nodes."""
    per_node = problem.num_ranks if problem.ranks_per_node == 1 else problem.ranks_per_node
    return np.append(np.arange(0, problem.num_ranks, per_node), problem.num_ranks)


def _prices(batch: Batch, problem: Problem) -> FloatArray:
    """Return [2^n, ranks + 1, 2] seconds of the sequences of each mask on groups inside a node and across nodes."""
    ranks, per_node, sequences = problem.num_ranks, problem.ranks_per_node, len(batch.rows)
    groups = [(degree, INSIDE, range(degree)) for degree in range(1, min(per_node, ranks) + 1)]
    if per_node < ranks:
        firsts = [(degree, max(0, per_node - degree + 1)) for degree in range(2, ranks + 1)]
        groups += [(degree, ACROSS, range(first, first + degree)) for degree, first in firsts]
    members = [[i for i in range(sequences) if mask >> i & 1] for mask in range(1, 2**sequences)]
    work, offsets = batch.work.take(np.concatenate(members)), offsets_of([len(pack) for pack in members])
    seconds, on_nodes = np.full((2**sequences, ranks + 1, 2), np.inf), replace(problem, ranks_per_node=per_node)
    for degree, place, group in groups:
        tokens = pack_work(work, offsets, degree, problem.profile, problem.padding_multiple).tokens
        # Ranks across nodes lie as here, which they need not if they share heads.
        packs = PlacedPacks(
            work=work,
            offsets=offsets,
            rank_offsets=offsets_of([degree] * len(members)),
            ranks=np.tile(np.array(group, dtype=np.int32), len(members)),
        )
        priced = microbatch_prices(packs, on_nodes, problem.profile, heads=problem.attention).seconds
        seconds[1:, degree, place] = np.where(tokens <= degree * problem.tokens_per_rank, priced, np.inf)
    if per_node == 1:
        seconds[:, 2:, INSIDE] = seconds[:, 2:, ACROSS]
    return seconds


def _assignment(waves: list[_MicroBatches], nodes: Nodes, *, are_numbered: bool) -> Assignment:
    """Give micro-batches their ranks; waves have numbers under `microbatch`."""
    ranks = [group for wave in waves for group in _groups(wave, nodes)]
    masks = [mask for wave in waves for mask in wave.masks.tolist()]
    packs = [np.array([i for i in range(mask.bit_length()) if mask >> i & 1], dtype=np.int64) for mask in masks]
    numbers = np.repeat(np.arange(len(waves)) if are_numbered else [-1], [len(wave.masks) for wave in waves])
    return Assignment(
        wave=numbers.astype(np.int32),
        rank_offsets=offsets_of([len(group) for group in ranks]),
        ranks=np.concatenate(ranks).astype(np.int32),
        member_offsets=offsets_of([len(pack) for pack in packs]),
        members=np.concatenate(packs),
    )


def _groups(wave: _MicroBatches, nodes: Nodes) -> list[IntArray]:
    """Return the ranks of each micro-batch, ascending: of a node's free ranks those that were busy last."""
    free_at, groups = np.zeros(nodes.first[-1]), []
    for mask, start, counts in zip(wave.masks, wave.starts, wave.counts, strict=True):
        chosen = []
        for first, stop, count in zip(nodes.first[:-1], nodes.first[1:], counts, strict=True):
            free = first + np.flatnonzero(free_at[first:stop] <= start)
            chosen.append(free[np.argsort(free_at[free], kind="stable")][len(free) - count :])
        group = np.sort(np.concatenate(chosen))
        place = ACROSS if np.count_nonzero(counts) > 1 else INSIDE
        free_at[group] = start + nodes.seconds[mask, len(group), place]
        groups.append(group)
    return groups
