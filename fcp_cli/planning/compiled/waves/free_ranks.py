"""The free ranks of a wave, and the placement of groups on them.

The free ranks of a node are contiguous, since groups take them from either end. Nodes are in linked lists by their
number of free ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import NONE, PlannerInputs, Sequences, across_at_best, alone_seconds

# Seconds: sums that are equal on paper may differ in their last bits, which must not cost a rank or a wave.
SLACK = 1e-12


class FreeRanks(NamedTuple):
    """The free ranks of each node.

    Attributes:
        free, start: [nodes] number of free ranks, and the first of them.
        bucket: [ranks_per_node + 1] first node with each number of free ranks, or -1.
        next_node, before_node: [nodes] doubly linked list of the nodes with equally many free ranks; -1 at the ends.
        used: [num_ranks] 1 for a rank that has a group; only maintained if rings come from a catalogue.
        used_before: [num_ranks + 1] prefix sums of `used`.
        too_wide: [1] least degree for which no run of free ranks across nodes was found. Free ranks only become fewer
            while a wave is filled, so wider groups need no search.
    """

    free: IntArray
    start: IntArray
    bucket: IntArray
    next_node: IntArray
    before_node: IntArray
    used: IntArray
    used_before: IntArray
    too_wide: IntArray


@kernel
def make_free_ranks(inputs: PlannerInputs) -> Any:
    """Allocate the arrays; `free_all` initializes them."""
    nodes = (inputs.num_ranks + inputs.ranks_per_node - 1) // inputs.ranks_per_node
    return FreeRanks(
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(inputs.ranks_per_node + 1, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(inputs.num_ranks, dtype=np.int64),
        np.zeros(inputs.num_ranks + 1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@leaf
def free_all(inputs: PlannerInputs, ranks: FreeRanks) -> None:
    """Free all ranks."""
    ranks.too_wide[0] = inputs.num_ranks + 1
    ranks.used[:] = 0
    ranks.used_before[:] = 0
    ranks.bucket[:] = -1
    for node in range(len(ranks.free) - 1, -1, -1):  # backwards, so that lists start with the first node
        ranks.start[node] = node * inputs.ranks_per_node
        ranks.free[node] = min(inputs.ranks_per_node, inputs.num_ranks - node * inputs.ranks_per_node)
        _list_by_free_ranks(node, ranks)


@inlined
def _list_by_free_ranks(node: int, ranks: FreeRanks) -> None:
    """Insert a node at the head of the list for its number of free ranks."""
    after = ranks.bucket[ranks.free[node]]
    ranks.next_node[node], ranks.before_node[node] = after, -1
    if after >= 0:
        ranks.before_node[after] = node
    ranks.bucket[ranks.free[node]] = node


@leaf
def best_fit(degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> int:
    """Return the smallest number of free ranks >= degree that some node has, or 0."""
    # Best fit, which leaves the emptiest nodes to wider groups.
    for free in range(degree, inputs.ranks_per_node + 1):
        if ranks.bucket[free] >= 0:
            return free
    return 0


@leaf
def first_inside(degree: int, free: int, ranks: FreeRanks) -> int:
    """Return the first rank for a group inside the first node that has exactly `free` free ranks.

    Odd nodes are filled from the right, even ones from the left, so that the ranks left in two successive nodes can be
    neighbours, for a group across both.
    """
    node = ranks.bucket[free]
    return int(ranks.start[node] + (ranks.free[node] - degree if node % 2 else 0))


@leaf
def first_across(degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> int:
    """Return the first rank for a group on the shortest run of free ranks that holds it, or NONE."""
    per_node = inputs.ranks_per_node
    if degree >= ranks.too_wide[0] or (inputs.whole_nodes and degree % per_node):
        return NONE
    chosen, shortest = NONE, inputs.num_ranks + 1
    run, stop = 0, 0  # the run that ends before rank `stop`
    # One more iteration than nodes, so that the last run ends like any other.
    for node in range(len(ranks.free) + 1):
        free = ranks.free[node] if node < len(ranks.free) else 0
        # Under a limit of peers, groups across nodes must consist of whole nodes, so a node in use breaks the run.
        if inputs.whole_nodes and free < per_node:
            free = 0
        if free and ranks.start[node] == stop:
            stop += free
            continue
        if degree <= stop - run < shortest:
            shortest = stop - run
            chosen = _first_in_run(run, stop, degree, inputs)
        if free:
            run, stop = ranks.start[node], ranks.start[node] + free
        else:
            run, stop = 0, 0
    if chosen == NONE:
        ranks.too_wide[0] = degree
    return chosen


@inlined
def _first_in_run(run: int, stop: int, degree: int, inputs: PlannerInputs) -> int:
    """Return the first rank for a group in the free ranks run..stop: at a node if it fills whole nodes, else at `run`.

    A group that splits a node anyway then uses the ranks left by another one, so free ranks stay in few pieces.
    """
    per_node = inputs.ranks_per_node
    node = (run + per_node - 1) // per_node * per_node
    return node if degree % per_node == 0 and node + degree <= stop else run


@leaf
def take(first: int, degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> None:
    """Mark `degree` ranks from `first` on as used; on each node they must be at either end of the free ranks."""
    stop = first + degree
    while first < stop:
        node = first // inputs.ranks_per_node
        taken = min(stop, ranks.start[node] + ranks.free[node]) - first
        _unlist(node, ranks)
        # At the left end the first free rank moves; at the right end only the number changes.
        if first == ranks.start[node]:
            ranks.start[node] += taken
        ranks.free[node] -= taken
        _list_by_free_ranks(node, ranks)
        first += taken


@leaf
def _unlist(node: int, ranks: FreeRanks) -> None:
    """Remove a node from its list."""
    before, after = ranks.before_node[node], ranks.next_node[node]
    if before >= 0:
        ranks.next_node[before] = after
    else:
        ranks.bucket[ranks.free[node]] = after
    if after >= 0:
        ranks.before_node[after] = before


@leaf
def first_in_catalogue(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, ranks: FreeRanks) -> Any:
    """Return first rank (or NONE) and degree of the narrowest free group of the catalogue that can run i by target.

    Among groups of one degree, choose the one with the shortest runs of free ranks on both sides.
    """
    tokens, chosen, degree, tightest = sequences.tokens[i], NONE, 0, 0
    for group in range(len(inputs.group_first) - 1, -1, -1):
        first, width = inputs.group_first[group], inputs.group_degree[group]
        # Narrowest first: a wider group would only take ranks that other sequences need.
        if chosen != NONE and width > degree:
            break
        if width * inputs.tokens_per_rank < tokens:
            continue
        if alone_seconds(i, width, across_at_best(width, inputs), sequences, inputs) > target + SLACK:
            continue
        if ranks.used_before[first + width] > ranks.used_before[first]:
            continue
        low, high = 0, inputs.num_ranks
        # Next to a group inside a node, only runs inside that node count.
        if width <= inputs.ranks_per_node:
            low = first - first % inputs.ranks_per_node
            high = min(high, low + inputs.ranks_per_node)
        before, after = _free_beside(first, first + width, low, high, ranks.used)
        # By the total, then by the shorter side: a single long run holds more groups than two short ones.
        run = (before + after) * inputs.num_ranks + min(before, after)
        if chosen == NONE or run < tightest:
            chosen, degree, tightest = first, width, run
    return chosen, degree


@leaf
def _free_beside(first: int, stop: int, low: int, high: int, used: IntArray) -> Any:
    """Return the numbers of free ranks right before and right after the ranks first..stop, within low..high."""
    before, after = first, stop
    while before > low and used[before - 1] == 0:
        before -= 1
    while after < high and used[after] == 0:
        after += 1
    return first - before, after - stop
