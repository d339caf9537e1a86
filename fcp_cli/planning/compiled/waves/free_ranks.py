"""The ranks of a wave that have no group yet: where a group of a degree finds a place.

The free ranks of a node are contiguous, since groups take them from either end. Nodes are listed by how many they have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import NONE, PlannerInputs, Sequences, across_at_best, alone_seconds

# Seconds: sums that agree on paper may differ in their last bits, and must not cost a rank or a wave.
SLACK = 1e-12


class FreeRanks(NamedTuple):
    """The free ranks of each node.

    Attributes:
        free, start: [nodes] how many free ranks a node has, and the first of them.
        bucket: [ranks_per_node + 1] for each number of free ranks, the first node with so many, or -1.
        next_node, before_node: [nodes] the others with as many, linked both ways; -1 at the ends.
        used: [num_ranks] 1 for a rank that has a group; kept only if rings come from a catalogue.
        used_before: [num_ranks + 1] how many of the ranks before each are used.
        too_wide: [1] least degree for which no run of free ranks over nodes was found. Ranks only become fewer while a
            wave is filled, so wider groups are not looked for.
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
    """Make the arrays; `free_all` sets them."""
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
    # Nothing was looked for in vain yet.
    ranks.too_wide[0] = inputs.num_ranks + 1
    ranks.used[:] = 0
    ranks.used_before[:] = 0
    ranks.bucket[:] = -1
    for node in range(len(ranks.free) - 1, -1, -1):  # backwards, so that lists begin with the first node
        ranks.start[node] = node * inputs.ranks_per_node
        ranks.free[node] = min(inputs.ranks_per_node, inputs.num_ranks - node * inputs.ranks_per_node)
        _list_by_free_ranks(node, ranks)


@inlined
def _list_by_free_ranks(node: int, ranks: FreeRanks) -> None:
    """Enter a node into the list of the nodes with as many free ranks."""
    after = ranks.bucket[ranks.free[node]]
    ranks.next_node[node], ranks.before_node[node] = after, -1
    if after >= 0:
        ranks.before_node[after] = node
    ranks.bucket[ranks.free[node]] = node


@leaf
def best_fit(degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> int:
    """Return the smallest number of free ranks >= degree that some node has, or 0."""
    # The tightest node first: it leaves the roomiest ones to groups that are wider still.
    for free in range(degree, inputs.ranks_per_node + 1):
        if ranks.bucket[free] >= 0:
            return free
    return 0


@leaf
def first_inside(degree: int, free: int, ranks: FreeRanks) -> int:
    """Return the first rank for a group in the first node with so many free ranks.

    Even nodes are filled from the left, odd ones from the right, so that the ranks that two of them have left are
    neighbours, which a group across both can take.
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
    # One node more than there is, so that the last run ends like any other.
    for node in range(len(ranks.free) + 1):
        free = ranks.free[node] if node < len(ranks.free) else 0
        # A node in use breaks the run: a limit of peers lets groups cross nodes only as whole ones.
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
    """Return the start of a group in the free ranks run..stop: at a node if it fills whole nodes, else at the left end.

    So a group that breaks a node anyway also takes the ranks that another one left, and free ranks stay in few pieces.
    """
    per_node = inputs.ranks_per_node
    node = (run + per_node - 1) // per_node * per_node
    return node if degree % per_node == 0 and node + degree <= stop else run


@leaf
def take(first: int, degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> None:
    """Take free ranks, at either end of those of each node, from the nodes that they are on."""
    stop = first + degree
    while first < stop:
        node = first // inputs.ranks_per_node
        taken = min(stop, ranks.start[node] + ranks.free[node]) - first
        _unlist(node, ranks)
        # At the left end the first free rank moves; at the right end only their number falls.
        if first == ranks.start[node]:
            ranks.start[node] += taken
        ranks.free[node] -= taken
        _list_by_free_ranks(node, ranks)
        first += taken


@leaf
def _unlist(node: int, ranks: FreeRanks) -> None:
    """Take a node out of the list that it is in."""
    before, after = ranks.before_node[node], ranks.next_node[node]
    if before >= 0:
        ranks.next_node[before] = after
    else:
        ranks.bucket[ranks.free[node]] = after
    if after >= 0:
        ranks.before_node[after] = before


@leaf
def first_in_catalogue(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, ranks: FreeRanks) -> Any:
    """Return first rank (or NONE) and degree of the narrowest free group of the catalogue that ends i by target.

    Of several groups of one degree it is the one that leaves the shortest runs of free ranks on either side.
    """
    tokens, chosen, degree, tightest = sequences.tokens[i], NONE, 0, 0
    for group in range(len(inputs.group_first) - 1, -1, -1):
        first, width = inputs.group_first[group], inputs.group_degree[group]
        # Narrowest first: a wider group could only take ranks that another sequence needs.
        if chosen != NONE and width > degree:
            break
        if width * inputs.tokens_per_rank < tokens:
            continue
        if alone_seconds(i, width, across_at_best(width, inputs), sequences, inputs) > target + SLACK:
            continue
        if ranks.used_before[first + width] > ranks.used_before[first]:
            continue
        low, high = 0, inputs.num_ranks
        # Runs next to a group inside a node are only for groups of that node.
        if width <= inputs.ranks_per_node:
            low = first - first % inputs.ranks_per_node
            high = min(high, low + inputs.ranks_per_node)
        before, after = _free_beside(first, first + width, low, high, ranks.used)
        # The total first, then the shorter side: one long run holds more groups than two short ones.
        run = (before + after) * inputs.num_ranks + min(before, after)
        if chosen == NONE or run < tightest:
            chosen, degree, tightest = first, width, run
    return chosen, degree


@leaf
def _free_beside(first: int, stop: int, low: int, high: int, used: IntArray) -> Any:
    """Count the free ranks right before and right after the ranks first..stop, as far as low..high."""
    before, after = first, stop
    while before > low and used[before - 1] == 0:
        before -= 1
    while after < high and used[after] == 0:
        after += 1
    return first - before, after - stop
