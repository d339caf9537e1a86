"""Rings on rank timelines: the ranks and the start of each long sequence, such that all end by a target.

A ring takes neighbouring ranks of one node, or whole neighbouring nodes and the first ranks of the next. Among all
degrees and placements that end in time, the one with the least waste is chosen. Waste is rank-seconds beyond the
sequence's work: waits of the ranks for each other, exposed communication, the fixed cost of a micro-batch per rank,
and time before the target that is too short for another micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.core import (
    Loads,
    PlannerInputs,
    Sequences,
    across_at_best,
    across_of,
    alone_seconds,
    least_degree,
    make_loads,
)
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf


class Rings(NamedTuple):
    """Groups of degree > 1, in the order of their placement, and the time that they leave on each rank.

    Attributes:
        sequence, degree, first, start, end: [sequences] sequence, degree, first rank, start and end of each ring.
        across: [sequences] see `pack_seconds`.
        loads: [sequences] load of each ring, including the riders of `single_rank_packs`.
        placed: [1] number of rings; entries beyond are unused.
        free: [num_ranks] seconds from which each rank is free.
        gap_rank, gap_start, gap_end: waits of ranks before a ring that are long enough to fill. If the arrays are full,
            further gaps stay unused.
        gaps: [1] number of gaps.
    """

    sequence: IntArray
    degree: IntArray
    first: IntArray
    start: FloatArray
    end: FloatArray
    across: IntArray
    loads: Loads
    placed: IntArray
    free: FloatArray
    gap_rank: IntArray
    gap_start: FloatArray
    gap_end: FloatArray
    gaps: IntArray


@kernel
def make_rings(sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make space for as many rings as sequences; the number of gaps is limited to keep memory linear in ranks."""
    n = len(sequences.work)
    gaps = min(4 * inputs.num_ranks, n)
    return Rings(
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n),
        np.zeros(n),
        np.zeros(n, dtype=np.int64),
        make_loads(n),
        np.zeros(1, dtype=np.int64),
        np.zeros(inputs.num_ranks),
        np.zeros(gaps, dtype=np.int64),
        np.zeros(gaps),
        np.zeros(gaps),
        np.zeros(1, dtype=np.int64),
    )


@kernel
def place_rings(target: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings) -> bool:
    """Place rings for `rings.sequence[:rings.placed[0]]`, in that order; return whether all can end by target."""
    rings.free[:] = 0.0
    rings.gaps[0] = 0
    for g in range(rings.placed[0]):
        # Greedy by falling work: placed rings stay, so an attempt is linear in the number of rings.
        first, degree = _least_waste(rings.sequence[g], target, sequences, inputs, rings)
        if degree == 0:
            return False
        rings.first[g], rings.degree[g] = first, degree
        _enter_ring(g, sequences, inputs, rings)
    return True


@kernel
def _least_waste(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings) -> Any:
    """Return first rank and degree of the least wasteful group that can run sequence i by target; degree 0: none."""
    if len(inputs.group_first):
        group = _from_catalogue(i, target, sequences, inputs, rings)
        return (inputs.group_first[group], inputs.group_degree[group]) if group >= 0 else (0, 0)
    waste, degree, first = _inside_a_node(i, target, np.inf, sequences, inputs, rings)
    # Second, since the waste inside a node bounds this search, and often ends it at the first degree.
    if inputs.num_ranks > inputs.ranks_per_node:
        _waste, wide_degree, wide_first = _across_nodes(i, target, waste, sequences, inputs, rings)
        if wide_degree > 0:
            return wide_first, wide_degree
    return first, degree


@leaf
def _inside_a_node(
    i: int, target: float, bound: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings
) -> Any:
    """Return least waste, degree (0 if none wastes less than `bound`) and first rank for sequence i inside a node."""
    attention, linear = sequences.attention[i], sequences.linear[i]
    lowest = max(2, least_degree(i, sequences, inputs))
    best, best_degree, best_first = bound, 0, -1
    for degree in range(lowest, min(inputs.ranks_per_node, inputs.num_ranks) + 1):
        seconds = alone_seconds(i, degree, 0, sequences, inputs)
        # Too late even on ranks that are free from the start.
        if seconds > target:
            continue
        # Messages, and the fixed seconds of a micro-batch on each rank.
        extra = degree * seconds - attention - linear
        # A wider ring wastes more, so the first that cannot win ends the search.
        if extra >= best:
            if len(inputs.splits.heads):
                continue  # a wider group may use a larger Ulysses degree
            break
        for base in range(0, inputs.num_ranks, inputs.ranks_per_node):
            for first in range(base, min(base + inputs.ranks_per_node, inputs.num_ranks) - degree + 1):
                # A quick test of both ends before reading all ranks.
                if max(rings.free[first], rings.free[first + degree - 1]) + seconds > target:
                    continue
                start, total = 0.0, 0.0
                for rank in range(first, first + degree):
                    start = max(start, rings.free[rank])
                    total += rings.free[rank]
                left = target - start - seconds
                if left < 0.0:
                    continue
                # If too little time is left for another micro-batch, it is wasted, too.
                waste = extra + degree * start - total + (degree * left if left < _least_gap(inputs) else 0.0)
                if waste < best:
                    best, best_degree, best_first = waste, degree, first
            if best <= extra:  # nothing is wasted beyond `extra`: no other node can be better at this degree
                break
    return best, best_degree, best_first


@kernel
def _across_nodes(
    i: int, target: float, bound: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings
) -> Any:
    """Find the least waste of sequence i on whole neighbouring nodes and the first ranks of the next one.

    Returns:
        Waste, degree (0 if none wastes less than `bound`) and first rank.
    """
    attention, linear = sequences.attention[i], sequences.linear[i]
    per_node = inputs.ranks_per_node
    nodes = inputs.num_ranks // per_node
    # Filled lazily: most rings are placed inside a node, and then no wider one can win.
    free_from, before = np.zeros(0), np.zeros(0)
    # Narrower groups are tried inside a node.
    lowest = max(per_node + 1, least_degree(i, sequences, inputs))
    best, best_degree, best_first = bound, 0, -1
    degree = lowest
    if inputs.whole_nodes:
        degree = (lowest + per_node - 1) // per_node * per_node
    while degree <= inputs.num_ranks:
        seconds = alone_seconds(i, degree, across_at_best(degree, inputs), sequences, inputs)
        if seconds <= target:
            extra = degree * seconds - attention - linear
            if extra >= best:
                break
            if len(before) == 0:
                free_from, before = _taken_seconds(inputs, rings)
            # A monotonic queue over a sliding window of nodes, whose head is the node that is free last.
            latest = np.zeros(nodes, dtype=np.int64)
            whole = degree // per_node
            head, tail = 0, 0
            for node in range(nodes):
                while tail > head and free_from[latest[tail - 1]] <= free_from[node]:
                    tail -= 1
                latest[tail] = node
                tail += 1
                if latest[head] <= node - whole:
                    head += 1
                first = (node - whole + 1) * per_node
                # The window is not full yet, or too few ranks follow it.
                if first < 0 or first + degree > inputs.num_ranks:
                    continue
                start = free_from[latest[head]]
                for rank in range(first + whole * per_node, first + degree):
                    start = max(start, rings.free[rank])
                left = target - start - seconds
                if left < 0.0:
                    continue
                # The waits of all ranks, from prefix sums.
                waste = extra + degree * start - (before[first + degree] - before[first])
                waste += degree * left if left < _least_gap(inputs) else 0.0
                if waste < best:
                    best, best_degree, best_first = waste, degree, first
        # A single rank matters for narrow rings; wide ones are only tried on whole nodes, to keep the search short.
        stepwise = degree < lowest + per_node and not inputs.whole_nodes
        degree = degree + 1 if stepwise else (degree // per_node + 1) * per_node
    return best, best_degree, best_first


@kernel
def _taken_seconds(inputs: PlannerInputs, rings: Rings) -> Any:
    """Return [whole nodes] when all ranks of each node are free, and [ranks + 1] prefix sums of `rings.free`."""
    per_node = inputs.ranks_per_node
    free_from, before = np.zeros(inputs.num_ranks // per_node), np.zeros(inputs.num_ranks + 1)
    for rank in range(inputs.num_ranks):
        before[rank + 1] = before[rank] + rings.free[rank]
        if rank // per_node < len(free_from):
            free_from[rank // per_node] = max(free_from[rank // per_node], rings.free[rank])
    return free_from, before


@leaf
def _from_catalogue(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings) -> int:
    """Return the catalogue's group with the least waste that can run sequence i by target, or -1."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    best, best_group = np.inf, -1
    for group in range(len(inputs.group_first)):
        first, degree = inputs.group_first[group], inputs.group_degree[group]
        if degree * inputs.tokens_per_rank < tokens:
            break  # widest first, so no later group is wide enough
        seconds = alone_seconds(i, degree, across_at_best(degree, inputs), sequences, inputs)
        start = 0.0
        for rank in range(first, first + degree):
            start = max(start, rings.free[rank])
        left = target - start - seconds
        if left < 0.0:
            continue
        waste = degree * seconds - attention - linear + (degree * left if left < _least_gap(inputs) else 0.0)
        for rank in range(first, first + degree):
            waste += start - rings.free[rank]
        if waste < best:
            best, best_group = waste, group
    return best_group


@leaf
def _enter_ring(g: int, sequences: Sequences, inputs: PlannerInputs, rings: Rings) -> None:
    """Add ring g, whose ranks are chosen, to the timelines, with its start, its end and the gaps before it."""
    first, degree = rings.first[g], rings.degree[g]
    start = 0.0
    for rank in range(first, first + degree):
        start = max(start, rings.free[rank])
    # The real `across`: a group of the catalogue need not be at the best placement.
    across = across_of(first, degree, inputs)
    end = start + alone_seconds(rings.sequence[g], degree, across, sequences, inputs)
    rings.across[g], rings.start[g], rings.end[g] = across, start, end
    for rank in range(first, first + degree):
        gap = rings.gaps[0]
        # Shorter waits fit at most half as much work as the fixed seconds of a micro-batch. Longer ones are rare (13 of
        # 89 random steps, 3 of 12 benchmark families), and filling them made none of these steps faster.
        if start - rings.free[rank] > _least_gap(inputs) and gap < len(rings.gap_rank):
            rings.gap_rank[gap] = rank
            rings.gap_start[gap] = rings.free[rank]
            rings.gap_end[gap] = start
            rings.gaps[0] = gap + 1
        rings.free[rank] = end


@inlined
def _least_gap(inputs: PlannerInputs) -> float:
    """Return the seconds that a gap before a ring must have to be of use: one and a half shortest micro-batches."""
    return 1.5 * max(inputs.prices.beta, inputs.prices.host)
