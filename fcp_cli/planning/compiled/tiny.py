"""Exact answers for tiny steps: every way to split a few sequences into packs on a few ranks, by branch and bound.

Prices come as a table, so that this file knows nothing of the cost model: [2^n, ranks + 1, 2] seconds of the sequences
of a bit mask as one pack on a group of some degree, inside a node or across nodes; inf if the pack does not fit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import kernel

INSIDE, ACROSS = 0, 1
_ROUNDING = 1e-12  # relative; sums of the same seconds in another order differ by less


class Nodes(NamedTuple):
    """Ranks by node, and prices: node j has `ranks[first[j]:first[j + 1]]`."""

    first: IntArray
    seconds: FloatArray


class Least(NamedTuple):
    """Lower bounds of the sequences of each mask.

    Attributes:
        area: [2^n] rank-seconds of all.
        alone: [2^n] seconds of the longest of them by itself.
        pack: [2^n] seconds of all as one pack.
    """

    area: FloatArray
    alone: FloatArray
    pack: FloatArray


class Branch(NamedTuple):
    """The branch of a search that is looked at, by depth: how many micro-batches it has placed.

    Attributes:
        free: [depth, ranks] when each rank is free, ascending within a node.
        masks: [depth] the sequences that are left.
        starts, packs, ways: [depth] start, sequences and choice of ranks of the micro-batch placed there.
        counts: [depth, nodes] its ranks of each node.
        ends: [depth] when the last of those before ends.
    """

    free: FloatArray
    masks: IntArray
    starts: FloatArray
    packs: IntArray
    ways: IntArray
    counts: IntArray
    ends: FloatArray


@kernel
def least(nodes: Nodes) -> Any:
    """Return the lower bounds of the sequences of each mask."""
    masks, degrees = nodes.seconds.shape[0], nodes.seconds.shape[1]
    area, alone, cheapest, pack_seconds = np.zeros(masks), np.zeros(masks), np.full(masks, np.inf), np.zeros(masks)
    for mask in range(1, masks):
        pack_seconds[mask] = nodes.seconds[mask].min()
        for degree in range(1, degrees):
            cheapest[mask] = min(cheapest[mask], degree * nodes.seconds[mask, degree].min())
    for mask in range(1, masks):
        # Every split has one pack with the first sequence: fixing it avoids counting splits twice.
        low, pack = mask & -mask, mask
        alone[mask] = max(alone[mask ^ low], nodes.seconds[low].min())
        area[mask] = np.inf
        while pack:
            if pack & low:
                area[mask] = min(area[mask], cheapest[pack] + area[mask ^ pack])
            pack = (pack - 1) & mask
    return Least(area, alone, pack_seconds)


@kernel
def quickest(mask: int, upper: float, last_start: float, branches: int, nodes: Nodes, least_of: Least) -> Any:
    """Search for micro-batches that run the sequences of a mask in fewer than `upper` seconds.

    A micro-batch begins as soon as its ranks are free. They are placed by ascending start, so a rank that is free
    before the last start is free from it on: which of a node's free ranks are taken does not matter, only how many.

    Args:
        mask: the sequences.
        upper: seconds of a known answer, or inf.
        last_start: when the last may begin: 0 for one wave, inf for whole timelines.
        branches: most micro-batches to place before giving up.
        nodes, least_of: ranks and prices, and bounds that follow from them.

    Returns:
        (seconds, [packs] masks, [packs] starts, [packs, nodes] ranks of each node, whether the search was complete); no
        packs if none is better.
    """
    at = _first_branch(mask, nodes)
    best, found, depth = upper, 0, 0
    best_packs, best_starts, best_counts = at.packs.copy(), at.starts.copy(), at.counts.copy()
    while depth >= 0 and branches > 0:
        # Equal answers in another order of sums are no better, and would be searched again.
        limit = best * (1.0 - _ROUNDING)
        if not _next_choice(depth, last_start, limit, at, nodes, least_of):
            depth -= 1
            continue
        end = _taken(depth, limit, at, nodes)
        left = at.masks[depth] ^ at.packs[depth]
        # All ranks together must have the rank-seconds of the remaining work, or this branch cannot win.
        if end < 0.0 or least_of.area[left] + _spent(at.starts[depth], at.free[depth + 1]) >= limit * at.free.shape[1]:
            continue
        # Counted before the leaf test, so that a search with many answers ends as well.
        branches -= 1
        if left == 0:
            best, found = max(at.ends[depth], end), depth + 1
            best_packs[:], best_starts[:], best_counts[:] = at.packs, at.starts, at.counts
            continue
        at.ends[depth + 1] = max(at.ends[depth], end)
        depth += 1
        at.masks[depth], at.packs[depth], at.ways[depth], at.starts[depth] = left, left, 0, at.starts[depth - 1]
    return best, best_packs[:found], best_starts[:found], best_counts[:found], depth < 0


@kernel
def _first_branch(mask: int, nodes: Nodes) -> Any:
    depths, num_nodes = 2, len(nodes.first) - 1
    # One micro-batch a sequence at most, and the state after the last.
    while 1 << (depths - 1) <= nodes.seconds.shape[0]:
        depths += 1
    branch = Branch(
        np.zeros((depths, nodes.seconds.shape[1] - 1)),
        np.zeros(depths, dtype=np.int64),
        np.zeros(depths),
        np.zeros(depths, dtype=np.int64),
        np.zeros(depths, dtype=np.int64),
        np.zeros((depths, num_nodes), dtype=np.int64),
        np.zeros(depths),
    )
    branch.masks[0] = branch.packs[0] = mask
    return branch


@kernel
def _next_choice(depth: int, last_start: float, limit: float, at: Branch, nodes: Nodes, least_of: Least) -> bool:
    """Move on to the next choice of ranks, else of a pack, else of a start; return False if none is left."""
    at.ways[depth] += 1
    latest = min(last_start, limit - least_of.alone[at.masks[depth]])
    while at.starts[depth] <= latest and at.starts[depth] < np.inf:
        if at.starts[depth] + least_of.pack[at.packs[depth]] < limit and _ranks_of(depth, at, nodes):
            return True
        at.ways[depth] = 1
        at.packs[depth] = (at.packs[depth] - 1) & at.masks[depth]
        # All packs were tried: the next start at which anything changes is when another rank gets free.
        if at.packs[depth] == 0:
            later = np.inf
            for free in at.free[depth]:
                if free > at.starts[depth]:
                    later = min(later, free)
            at.starts[depth], at.packs[depth] = later, at.masks[depth]
    return False


@kernel
def _ranks_of(depth: int, at: Branch, nodes: Nodes) -> bool:
    """Turn the number of a choice into ranks of each node; return False if the numbers have run out."""
    rest = at.ways[depth]
    for node in range(len(nodes.first) - 1):
        available = 0
        for rank in range(nodes.first[node], nodes.first[node + 1]):
            available += at.free[depth, rank] <= at.starts[depth]
        # The choice is one number in a mixed radix, so that a depth keeps an integer and no array.
        at.counts[depth, node] = rest % (available + 1)
        rest //= available + 1
    return bool(rest == 0)


@kernel
def _taken(depth: int, limit: float, at: Branch, nodes: Nodes) -> float:
    """Take the chosen ranks, those of a node that are free last, and return the end; -1 if there is no need to look.

    That is: it ends too late, it could begin sooner, or equal nodes or packs are in another order.
    """
    pack, start, free, after = at.packs[depth], at.starts[depth], at.free[depth], at.free[depth + 1]
    begins_with_last = depth > 0 and start == at.starts[depth - 1]
    # Micro-batches with one start may be placed in any order: only the falling one is searched.
    if begins_with_last and pack > at.packs[depth - 1]:
        return -1.0
    degree, used = 0, 0
    for count in at.counts[depth]:
        degree += count
        used += count > 0
    end = start + nodes.seconds[pack, degree, ACROSS if used > 1 else INSIDE]
    if not end < limit:
        return -1.0
    waits = begins_with_last or depth == 0
    after[:] = free
    for node in range(len(nodes.first) - 1):
        first, stop, count = nodes.first[node], nodes.first[node], at.counts[depth, node]
        if count == 0:
            continue
        # Nodes alike are interchangeable: only the order in which earlier ones give no fewer is searched.
        if _has_twin_with_fewer(node, depth, at, nodes):
            return -1.0
        while stop < nodes.first[node + 1] and free[stop] <= start:
            stop += 1
        waits = waits or free[stop - 1] == start
        after[stop - count : stop] = end
        # Ascending again: by that the ranks that got free last are found.
        after[first : nodes.first[node + 1]].sort()
    return end if waits else -1.0


@kernel
def _has_twin_with_fewer(node: int, depth: int, at: Branch, nodes: Nodes) -> bool:
    """Return whether an earlier node, free at the same times from the start on, gives fewer ranks than this one."""
    size, start = nodes.first[node + 1] - nodes.first[node], at.starts[depth]
    for other in range(node):
        alike = nodes.first[other + 1] - nodes.first[other] == size and at.counts[depth, other] < at.counts[depth, node]
        for i in range(size if alike else 0):
            one, two = at.free[depth, nodes.first[other] + i], at.free[depth, nodes.first[node] + i]
            alike = alike and max(one, start) == max(two, start)
        if alike:
            return True
    return False


@kernel
def _spent(start: float, free: FloatArray) -> float:
    """Return the rank-seconds that are spent once nothing can begin before `start` any more."""
    spent = 0.0
    for time in free:
        spent += max(time, start)
    return spent


@kernel
def waves(floor: float, branches: int, nodes: Nodes, least_of: Least) -> Any:
    """Find the quickest waves of a step whose ranks all synchronise after each.

    Args:
        floor: seconds that a wave takes at least.
        branches: most micro-batches to place for one wave.
        nodes, least_of: ranks and prices, and bounds that follow from them.

    Returns:
        ([waves] masks of the sequences of each wave, seconds of the step).
    """
    masks = nodes.seconds.shape[0]
    alone, total, first = np.full(masks, np.inf), np.full(masks, np.inf), np.zeros(masks, dtype=np.int64)
    total[0] = 0.0
    for mask in range(1, masks):
        alone[mask] = max(floor, quickest(mask, np.inf, 0.0, branches, nodes, least_of)[0])
        low, part = mask & -mask, mask
        while part:  # waves may be in any order, so put the first sequence in the first of them
            if part & low and alone[part] + total[mask ^ part] < total[mask]:
                total[mask], first[mask] = alone[part] + total[mask ^ part], part
            part = (part - 1) & mask
    chosen, mask, count = np.zeros(masks, dtype=np.int64), masks - 1, 0
    while mask:
        chosen[count] = first[mask]
        mask ^= first[mask]
        count += 1
    return chosen[:count], total[masks - 1]
