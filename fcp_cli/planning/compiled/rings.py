"""Rings on rank timelines: which ranks run each long sequence, and from when, so that all end by a target.

A ring takes ranks of one node, or whole nodes and a rest of one more. Among all degrees and places that end in time it
takes the one that wastes least: seconds its ranks wait for each other, exposed communication, one micro-batch's fixed
cost per rank, and an end so close to the target that nothing can follow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.plan.step import FloatArray, Int64Array
from fcp_cli.planning.compiled.compiling import kernel
from fcp_cli.planning.compiled.core import Machine, Sequences, alone_seconds, with_room_for


class Rings(NamedTuple):
    """Groups of degree > 1, in the order in which they were placed; `first` has one more entry: ranks used so far.

    Each sequence runs in one ring at most, so [sequences] entries suffice for all but `ranks`: what the rings need
    together is known only once they are placed, and may be every rank for every sequence. `place_rings` makes it grow.
    """

    sequence: Int64Array
    degree: Int64Array
    crosses: Int64Array
    start: FloatArray
    end: FloatArray
    first: Int64Array
    ranks: Int64Array


class Timeline(NamedTuple):
    """Per rank, the second from which it is free; per node, its ranks by that second; waits that could be filled."""

    free: FloatArray
    order: Int64Array
    gap_rank: Int64Array
    gap_start: FloatArray
    gap_end: FloatArray


@kernel
def make_rings(count: int, num_ranks: int) -> Any:
    return Rings(
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.zeros(count),
        np.zeros(count),
        np.zeros(count + 1, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
    )


@kernel
def _with_ranks_for(needed: int, rings: Rings) -> Any:
    """Return the same rings with space for `needed` ranks of all rings together."""
    return Rings(
        rings.sequence,
        rings.degree,
        rings.crosses,
        rings.start,
        rings.end,
        rings.first,
        with_room_for(needed, rings.ranks),
    )


@kernel
def make_timeline(num_ranks: int, gaps: int) -> Any:
    """Make timelines that remember at most `gaps` waits; `_book` forgets the rest."""
    return Timeline(
        np.zeros(num_ranks),
        np.arange(num_ranks),
        np.zeros(gaps, dtype=np.int64),
        np.zeros(gaps),
        np.zeros(gaps),
    )


@kernel
def _inside_a_node(
    i: int, target: float, bound: float, sequences: Sequences, machine: Machine, timeline: Timeline
) -> Any:
    """The least waste of sequence i inside one node: (waste, degree, node, last), last counting in the node's order."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    lowest = max(2, (tokens + machine.budget - 1) // machine.budget)
    nodes = (machine.num_ranks + machine.per_node - 1) // machine.per_node
    best, best_degree, best_node, best_last = bound, 0, -1, 0
    for degree in range(lowest, min(machine.per_node, machine.num_ranks) + 1):
        seconds = alone_seconds(attention, linear, tokens, degree, False, machine)
        if seconds > target:
            continue
        extra = degree * seconds - attention - linear
        if extra >= best:
            break
        for node in range(nodes):
            base = node * machine.per_node
            size = min(machine.per_node, machine.num_ranks - base)
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
def _earliest_nodes(degree: int, machine: Machine, timeline: Timeline, chosen: Int64Array) -> float:
    """Choose whole nodes, and one more for the rest, that are free soonest; returns from when all are free."""
    whole, rest = degree // machine.per_node, degree % machine.per_node
    full = machine.num_ranks // machine.per_node
    nodes = (machine.num_ranks + machine.per_node - 1) // machine.per_node
    free_from = np.empty(full)
    for node in range(full):
        free_from[node] = timeline.free[timeline.order[node * machine.per_node + machine.per_node - 1]]
    by_time = np.argsort(free_from, kind="mergesort")
    taken = np.zeros(nodes, dtype=np.bool_)
    start = 0.0
    for k in range(whole):
        chosen[k] = by_time[k]
        taken[by_time[k]] = True
        start = max(start, free_from[by_time[k]])
    if rest:
        soonest = np.inf
        for node in range(nodes):
            base = node * machine.per_node
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
    i: int, target: float, bound: float, sequences: Sequences, machine: Machine, timeline: Timeline, chosen: Int64Array
) -> Any:
    """The least waste of sequence i on more than one node: (waste, degree)."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    per_node = machine.per_node
    lowest = max(per_node + 1, (tokens + machine.budget - 1) // machine.budget)
    best, best_degree = bound, 0
    degree = lowest
    while degree <= machine.num_ranks:
        seconds = alone_seconds(attention, linear, tokens, degree, True, machine)
        if seconds <= target:
            extra = degree * seconds - attention - linear
            if extra >= best:
                break
            start = _earliest_nodes(degree, machine, timeline, chosen)
            left = target - start - seconds
            if left >= 0.0:
                waste = extra + (degree * left if left < 1.5 * machine.beta else 0.0)
                whole, rest = degree // per_node, degree % per_node
                for k in range(whole):
                    for r in range(chosen[k] * per_node, (chosen[k] + 1) * per_node):
                        waste += start - timeline.free[r]
                for k in range(rest):
                    waste += start - timeline.free[timeline.order[chosen[whole] * per_node + k]]
                if waste < best:
                    best, best_degree = waste, degree
        degree = degree + 1 if degree < lowest + per_node else (degree // per_node + 1) * per_node
    return best, best_degree


@kernel
def _from_catalogue(i: int, target: float, sequences: Sequences, machine: Machine, timeline: Timeline) -> int:
    """The rank set that wastes least if it runs sequence i by target, or -1."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    best, best_set = np.inf, -1
    for s in range(len(machine.set_first) - 1):
        ranks = machine.set_ranks[machine.set_first[s] : machine.set_first[s + 1]]
        degree = len(ranks)
        if degree * machine.budget < tokens:
            break  # the widest come first
        seconds = alone_seconds(attention, linear, tokens, degree, degree > machine.per_node, machine)
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


@kernel
def _sort_node(node: int, machine: Machine, timeline: Timeline) -> None:
    """Bring the ranks of a node back into the order in which they are free."""
    base = node * machine.per_node
    order, free = timeline.order, timeline.free
    for x in range(base + 1, min(base + machine.per_node, machine.num_ranks)):
        rank = order[x]
        y = x
        while y > base and (
            free[order[y - 1]] > free[rank] or (free[order[y - 1]] == free[rank] and order[y - 1] > rank)
        ):
            order[y] = order[y - 1]
            y -= 1
        order[y] = rank


@kernel
def place_rings(
    target: float, count: int, sequences: Sequences, machine: Machine, timeline: Timeline, rings: Rings
) -> Any:
    """Place the sequences rings.sequence[:count], in that order, to end by target.

    Returns:
        The number of gaps, or -1 where a sequence does not fit; and the rings, whose `ranks` may have grown.
    """
    per_node = machine.per_node
    for rank in range(machine.num_ranks):
        timeline.free[rank] = 0.0
        timeline.order[rank] = rank
    # `_earliest_nodes` chooses whole nodes, of which there are num_ranks // per_node, and at most one more.
    chosen = np.zeros(machine.num_ranks // per_node + 1, dtype=np.int64)
    gaps = 0
    for g in range(count):
        i = rings.sequence[g]
        n = rings.first[g]
        if len(machine.set_first) > 1:
            chosen_set = _from_catalogue(i, target, sequences, machine, timeline)
            if chosen_set < 0:
                return -1, rings
            rings = _with_ranks_for(n + machine.set_first[chosen_set + 1] - machine.set_first[chosen_set], rings)
            for k in range(machine.set_first[chosen_set], machine.set_first[chosen_set + 1]):
                rings.ranks[n] = machine.set_ranks[k]
                n += 1
            rings.first[g + 1] = n
            degree = n - rings.first[g]
            gaps = _book(g, degree, degree > per_node, gaps, sequences, machine, timeline, rings)
            continue
        waste, degree, node, last = _inside_a_node(i, target, np.inf, sequences, machine, timeline)
        wide_degree = 0
        if machine.num_ranks > per_node:
            waste, wide_degree = _across_nodes(i, target, waste, sequences, machine, timeline, chosen)
        if waste == np.inf:
            return -1, rings
        if wide_degree:
            degree = wide_degree
        rings = _with_ranks_for(n + degree, rings)
        if wide_degree:
            _earliest_nodes(degree, machine, timeline, chosen)
            for k in range(degree // per_node):
                for r in range(chosen[k] * per_node, (chosen[k] + 1) * per_node):
                    rings.ranks[n] = r
                    n += 1
            for k in range(degree % per_node):
                rings.ranks[n] = timeline.order[chosen[degree // per_node] * per_node + k]
                n += 1
        else:
            for k in range(last - degree + 1, last + 1):
                rings.ranks[n] = timeline.order[node * per_node + k]
                n += 1
        rings.first[g + 1] = n
        gaps = _book(g, degree, wide_degree > 0, gaps, sequences, machine, timeline, rings)
    return gaps, rings


@kernel
def _book(
    g: int,
    degree: int,
    crosses: bool,
    gaps: int,
    sequences: Sequences,
    machine: Machine,
    timeline: Timeline,
    rings: Rings,
) -> int:
    """Enter ring g, whose ranks are chosen, into the timelines."""
    i = rings.sequence[g]
    ranks = rings.ranks[rings.first[g] : rings.first[g + 1]]
    start = 0.0
    for r in ranks:
        start = max(start, timeline.free[r])
    end = start + alone_seconds(
        sequences.attention[i], sequences.linear[i], sequences.tokens[i], degree, crosses, machine
    )
    rings.degree[g] = degree
    rings.crosses[g] = crosses
    rings.start[g] = start
    rings.end[g] = end
    for r in ranks:
        if start - timeline.free[r] > 1.5 * machine.beta and gaps < len(timeline.gap_rank):
            timeline.gap_rank[gaps] = r
            timeline.gap_start[gaps] = timeline.free[r]
            timeline.gap_end[gaps] = start
            gaps += 1
        timeline.free[r] = end
    sorted_node = -1
    for r in ranks:
        if r // machine.per_node != sorted_node:
            sorted_node = r // machine.per_node
            _sort_node(sorted_node, machine, timeline)
    return gaps
