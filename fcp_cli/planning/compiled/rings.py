"""Rings on rank timelines: which ranks run each long sequence, and from when, so that all end by a target.

A ring takes ranks of one node, or whole nodes and a rest of one more. Among all degrees and places that end in time it
takes the one that wastes least: seconds its ranks wait for each other, exposed communication, one micro-batch's fixed
cost per rank, and an end so close to the target that nothing can follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling import kernel, leaf
from fcp_cli.planning.compiled.core import (
    ANY_RANKS,
    WHOLE_NODES,
    Machine,
    Sequences,
    across_at_best,
    across_of,
    alone_seconds,
    falling_order,
    with_room_for,
)


class Rings(NamedTuple):
    """Groups of degree > 1, in the order in which they were placed.

    Attributes:
        sequence, degree, across, start, end: [sequences] per ring; see `pack_seconds`.
        first: [sequences + 1] where the ranks of each ring begin in `ranks`.
        ranks: of all rings, back to back.
        placed: [1] number of rings.

    Each sequence runs in one ring at most, so [sequences] entries suffice for all but `ranks`: what the rings need
    together is known only once they are placed, and may be every rank for every sequence. `place_rings` asks for more.
    """

    sequence: IntArray
    degree: IntArray
    across: IntArray
    start: FloatArray
    end: FloatArray
    first: IntArray
    ranks: IntArray
    placed: IntArray


class Timeline(NamedTuple):
    """The time of the ranks that rings leave.

    Attributes:
        free: [num_ranks] second from which each rank is free.
        order: [num_ranks] the ranks of each node by that second.
        gap_rank, gap_start, gap_end: waits of ranks before a ring that something could fill, as many as there is
            space for: those beyond are lost to planning, but never written.
        gaps: [1] number of these waits.
    """

    free: FloatArray
    order: IntArray
    gap_rank: IntArray
    gap_start: FloatArray
    gap_end: FloatArray
    gaps: IntArray


@kernel
def make_rings(count: int, num_ranks: int) -> Any:
    """Make space for `count` rings; that for their ranks grows as they need it."""
    return Rings(
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count + 1, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@kernel
def with_ranks_for(needed: int, rings: Rings) -> Any:
    """Return the same rings with space for at least `needed` ranks of all rings together."""
    return Rings(
        rings.sequence,
        rings.degree,
        rings.across,
        rings.start,
        rings.end,
        rings.first,
        with_room_for(needed, rings.ranks),
        rings.placed,
    )


@kernel
def make_timeline(num_ranks: int, gaps: int) -> Any:
    """Make timelines with space for `gaps` waits."""
    return Timeline(
        np.zeros(num_ranks),
        np.arange(num_ranks),
        np.zeros(gaps, dtype=np.int64),
        np.zeros(gaps),
        np.zeros(gaps),
        np.zeros(1, dtype=np.int64),
    )


@leaf
def _inside_a_node(
    i: int, target: float, bound: float, sequences: Sequences, machine: Machine, timeline: Timeline
) -> Any:
    """Find the least waste of sequence i inside one node: waste, degree, node, last rank in the node's order."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    lowest = max(2, (tokens + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    nodes = (machine.num_ranks + machine.ranks_per_node - 1) // machine.ranks_per_node
    best, best_degree, best_node, best_last = bound, 0, -1, 0
    for degree in range(lowest, min(machine.ranks_per_node, machine.num_ranks) + 1):
        seconds = alone_seconds(i, degree, 0, sequences, machine)
        if seconds > target:
            continue
        extra = degree * seconds - attention - linear
        if extra >= best:
            if len(machine.splits.heads):
                continue  # a wider group may split more heads
            break
        for node in range(nodes):
            base = node * machine.ranks_per_node
            size = min(machine.ranks_per_node, machine.num_ranks - base)
            for last in range(degree - 1, size):
                start = timeline.free[timeline.order[base + last]]
                left = target - start - seconds
                if left < 0.0:
                    break
                waste = extra + (degree * left if left < 1.5 * machine.beta else 0.0)
                for other in range(last - degree + 1, last):
                    waste += start - timeline.free[timeline.order[base + other]]
                if waste < best:
                    best, best_degree, best_node, best_last = waste, degree, node, last
            if best <= extra:
                break
    return best, best_degree, best_node, best_last


@kernel
def _earliest_nodes(degree: int, machine: Machine, timeline: Timeline, chosen: IntArray) -> float:
    """Choose whole nodes, and one more for the rest, that are free soonest; return from when all are free."""
    whole, rest = degree // machine.ranks_per_node, degree % machine.ranks_per_node
    full = machine.num_ranks // machine.ranks_per_node
    nodes = (machine.num_ranks + machine.ranks_per_node - 1) // machine.ranks_per_node
    free_from, soonness = np.empty(full), np.empty(full)
    for node in range(full):
        free_from[node] = timeline.free[timeline.order[node * machine.ranks_per_node + machine.ranks_per_node - 1]]
        soonness[node] = -free_from[node]
    by_time = falling_order(soonness)
    taken = np.zeros(nodes, dtype=np.bool_)
    start = 0.0
    for k in range(whole):
        chosen[k] = by_time[k]
        taken[by_time[k]] = True
        start = max(start, free_from[by_time[k]])
    if rest:
        soonest = np.inf
        for node in range(nodes):
            base = node * machine.ranks_per_node
            if taken[node] or base + rest > machine.num_ranks:
                continue
            free = timeline.free[timeline.order[base + rest - 1]]
            if free < soonest:
                soonest = free
                chosen[whole] = node
        start = max(start, soonest)
    return start


@kernel
def _across_nodes(
    i: int, target: float, bound: float, sequences: Sequences, machine: Machine, timeline: Timeline, chosen: IntArray
) -> Any:
    """Find the least waste of sequence i on more than one node, and its degree; 0 where `bound` is less."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    ranks_per_node = machine.ranks_per_node
    lowest = max(ranks_per_node + 1, (tokens + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    best, best_degree = bound, 0
    degree = lowest
    while degree <= machine.num_ranks:
        seconds = alone_seconds(i, degree, across_at_best(degree, machine), sequences, machine)
        if seconds <= target:
            extra = degree * seconds - attention - linear
            if extra >= best:
                break
            start = _earliest_nodes(degree, machine, timeline, chosen)
            left = target - start - seconds
            if left >= 0.0:
                waste = extra + (degree * left if left < 1.5 * machine.beta else 0.0)
                whole, rest = degree // ranks_per_node, degree % ranks_per_node
                for k in range(whole):
                    for r in range(chosen[k] * ranks_per_node, (chosen[k] + 1) * ranks_per_node):
                        waste += start - timeline.free[r]
                for k in range(rest):
                    waste += start - timeline.free[timeline.order[chosen[whole] * ranks_per_node + k]]
                if waste < best:
                    best, best_degree = waste, degree
        degree = degree + 1 if degree < lowest + ranks_per_node else (degree // ranks_per_node + 1) * ranks_per_node
    return best, best_degree


@leaf
def _among_neighbours(
    i: int, target: float, bound: float, sequences: Sequences, machine: Machine, timeline: Timeline
) -> Any:
    """Find the least waste of sequence i on neighbours inside one node: waste, degree, first rank."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    lowest = max(2, (tokens + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    best, best_degree, best_first = bound, 0, -1
    for degree in range(lowest, min(machine.ranks_per_node, machine.num_ranks) + 1):
        seconds = alone_seconds(i, degree, 0, sequences, machine)
        if seconds > target:
            continue
        extra = degree * seconds - attention - linear
        if extra >= best:
            if len(machine.splits.heads):
                continue  # a wider group may split more heads
            break
        for base in range(0, machine.num_ranks, machine.ranks_per_node):
            for first in range(base, min(base + machine.ranks_per_node, machine.num_ranks) - degree + 1):
                start, total = 0.0, 0.0
                for rank in range(first, first + degree):
                    start = max(start, timeline.free[rank])
                    total += timeline.free[rank]
                left = target - start - seconds
                if left < 0.0:
                    continue
                waste = extra + degree * start - total + (degree * left if left < 1.5 * machine.beta else 0.0)
                if waste < best:
                    best, best_degree, best_first = waste, degree, first
            if best <= extra:
                break
    return best, best_degree, best_first


@kernel
def _among_neighbouring_nodes(
    i: int, target: float, bound: float, sequences: Sequences, machine: Machine, timeline: Timeline
) -> Any:
    """Find the least waste of sequence i on whole neighbouring nodes and the first ranks of the next one.

    Returns:
        Waste, degree (0 where `bound` is less) and first rank.
    """
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    per_node = machine.ranks_per_node
    nodes = machine.num_ranks // per_node
    free_from = np.zeros(nodes)
    before = np.zeros(machine.num_ranks + 1)  # seconds that the ranks before each are taken, together
    for rank in range(machine.num_ranks):
        before[rank + 1] = before[rank] + timeline.free[rank]
        if rank // per_node < nodes:
            free_from[rank // per_node] = max(free_from[rank // per_node], timeline.free[rank])
    latest = np.zeros(nodes, dtype=np.int64)  # the window's nodes that later ones do not outlast, by falling seconds
    lowest = max(per_node + 1, (tokens + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    best, best_degree, best_first = bound, 0, -1
    degree = lowest
    if machine.placement == WHOLE_NODES:
        degree = (lowest + per_node - 1) // per_node * per_node
    while degree <= machine.num_ranks:
        seconds = alone_seconds(i, degree, across_at_best(degree, machine), sequences, machine)
        if seconds <= target:
            extra = degree * seconds - attention - linear
            if extra >= best:
                break
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
                if first < 0 or first + degree > machine.num_ranks:
                    continue
                start = free_from[latest[head]]
                for rank in range(first + whole * per_node, first + degree):
                    start = max(start, timeline.free[rank])
                left = target - start - seconds
                if left < 0.0:
                    continue
                waste = extra + degree * start - (before[first + degree] - before[first])
                waste += degree * left if left < 1.5 * machine.beta else 0.0
                if waste < best:
                    best, best_degree, best_first = waste, degree, first
        stepwise = degree < lowest + per_node and machine.placement != WHOLE_NODES
        degree = degree + 1 if stepwise else (degree // per_node + 1) * per_node
    return best, best_degree, best_first


@leaf
def _from_catalogue(i: int, target: float, sequences: Sequences, machine: Machine, timeline: Timeline) -> int:
    """Return the group of the catalogue that wastes least if it runs sequence i by target, or -1."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    best, best_set = np.inf, -1
    for s in range(len(machine.group_first) - 1):
        ranks = machine.group_ranks[machine.group_first[s] : machine.group_first[s + 1]]
        degree = len(ranks)
        if degree * machine.tokens_per_rank < tokens:
            break  # the widest come first
        seconds = alone_seconds(i, degree, across_at_best(degree, machine), sequences, machine)
        start = 0.0
        for r in ranks:
            start = max(start, timeline.free[r])
        left = target - start - seconds
        if left < 0.0:
            continue
        waste = degree * seconds - attention - linear + (degree * left if left < 1.5 * machine.beta else 0.0)
        for r in ranks:
            waste += start - timeline.free[r]
        if waste < best:
            best, best_set = waste, s
    return best_set


@leaf
def _sort_node(node: int, machine: Machine, timeline: Timeline) -> None:
    """Bring the ranks of a node back into the order in which they are free."""
    base = node * machine.ranks_per_node
    order, free = timeline.order, timeline.free
    for x in range(base + 1, min(base + machine.ranks_per_node, machine.num_ranks)):
        rank = order[x]
        y = x
        while y > base and (
            free[order[y - 1]] > free[rank] or (free[order[y - 1]] == free[rank] and order[y - 1] > rank)
        ):
            order[y] = order[y - 1]
            y -= 1
        order[y] = rank


@kernel
def place_rings(target: float, sequences: Sequences, machine: Machine, timeline: Timeline, rings: Rings) -> int:
    """Place the sequences rings.sequence[:rings.placed[0]], in that order, to end by target.

    Returns:
        0 if all fit, -1 if one does not; else the ranks that `rings` must have space for, to be placed once more.
    """
    for rank in range(machine.num_ranks):
        timeline.free[rank] = 0.0
        timeline.order[rank] = rank
    timeline.gaps[0] = 0
    # `_earliest_nodes` chooses whole nodes, of which there are num_ranks // ranks_per_node, and at most one more.
    chosen = np.zeros(machine.num_ranks // machine.ranks_per_node + 1, dtype=np.int64)
    for g in range(rings.placed[0]):
        # Replacing `rings` in this loop would count the references to its arrays again for every ring: a few percent of
        # the planning time. So the caller makes it larger, which doubles it and is rare.
        if rings.first[g] + machine.num_ranks > len(rings.ranks):
            return int(rings.first[g]) + machine.num_ranks
        i = rings.sequence[g]
        if len(machine.group_first) > 1:
            s = _from_catalogue(i, target, sequences, machine, timeline)
            if s < 0:
                return -1
            degree = _take_from_catalogue(g, s, machine, rings)
        elif machine.placement != ANY_RANKS:
            degree = _take_neighbours(g, target, sequences, machine, timeline, rings)
            if degree == 0:
                return -1
        else:
            waste, degree, node, last = _inside_a_node(i, target, np.inf, sequences, machine, timeline)
            wide_degree = 0
            if machine.num_ranks > machine.ranks_per_node:
                waste, wide_degree = _across_nodes(i, target, waste, sequences, machine, timeline, chosen)
            if waste == np.inf:
                return -1
            if wide_degree > 0:
                degree = wide_degree
                _take_nodes(g, degree, chosen, machine, timeline, rings)
            else:
                base = node * machine.ranks_per_node + last - degree + 1
                for k in range(degree):
                    rings.ranks[rings.first[g] + k] = timeline.order[base + k]
        rings.first[g + 1] = rings.first[g] + degree
        _enter_ring(g, degree, sequences, machine, timeline, rings)
    return 0


@leaf
def _take_from_catalogue(g: int, s: int, machine: Machine, rings: Rings) -> int:
    """Give ring g the ranks of group s of the catalogue; return its degree."""
    begin, degree = machine.group_first[s], machine.group_first[s + 1] - machine.group_first[s]
    for k in range(degree):
        rings.ranks[rings.first[g] + k] = machine.group_ranks[begin + k]
    return int(degree)


@kernel
def _take_neighbours(
    g: int, target: float, sequences: Sequences, machine: Machine, timeline: Timeline, rings: Rings
) -> int:
    """Give ring g the neighbours that waste least if they run its sequence by target; return its degree, or 0."""
    i = rings.sequence[g]
    waste, degree, first = _among_neighbours(i, target, np.inf, sequences, machine, timeline)
    if machine.num_ranks > machine.ranks_per_node:
        waste, wide_degree, wide_first = _among_neighbouring_nodes(i, target, waste, sequences, machine, timeline)
        if wide_degree > 0:
            degree, first = wide_degree, wide_first
    for k in range(degree):
        rings.ranks[rings.first[g] + k] = first + k
    return int(degree)


@kernel
def _take_nodes(g: int, degree: int, chosen: IntArray, machine: Machine, timeline: Timeline, rings: Rings) -> None:
    """Give ring g so many ranks of the nodes that are free soonest."""
    # The search may have ended with the nodes of another degree in `chosen`.
    _earliest_nodes(degree, machine, timeline, chosen)
    n, whole, rest = rings.first[g], degree // machine.ranks_per_node, degree % machine.ranks_per_node
    for k in range(whole):
        for r in range(chosen[k] * machine.ranks_per_node, (chosen[k] + 1) * machine.ranks_per_node):
            rings.ranks[n] = r
            n += 1
    for k in range(rest):
        rings.ranks[n + k] = timeline.order[chosen[whole] * machine.ranks_per_node + k]


@leaf
def _enter_ring(
    g: int,
    degree: int,
    sequences: Sequences,
    machine: Machine,
    timeline: Timeline,
    rings: Rings,
) -> None:
    """Enter ring g, whose ranks are chosen, into the timelines."""
    i = rings.sequence[g]
    ranks = rings.ranks[rings.first[g] : rings.first[g + 1]]
    start = 0.0
    for r in ranks:
        start = max(start, timeline.free[r])
    across = across_of(ranks, machine)
    end = start + alone_seconds(i, degree, across, sequences, machine)
    rings.degree[g] = degree
    rings.across[g] = across
    rings.start[g] = start
    rings.end[g] = end
    for r in ranks:
        gap = timeline.gaps[0]
        if start - timeline.free[r] > 1.5 * machine.beta and gap < len(timeline.gap_rank):
            timeline.gap_rank[gap] = r
            timeline.gap_start[gap] = timeline.free[r]
            timeline.gap_end[gap] = start
            timeline.gaps[0] = gap + 1
        timeline.free[r] = end
    sorted_node = -1
    for r in ranks:
        if r // machine.ranks_per_node != sorted_node:
            sorted_node = r // machine.ranks_per_node
            _sort_node(sorted_node, machine, timeline)
