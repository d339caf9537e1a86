"""Placement of a wave's groups on ranks: inside a node if a group fits, else on whole nodes.

First-fit decreasing over nodes. Ranks of a node are taken from the left, so groups of powers of two are aligned and
the same groups recur in many waves, which limits the number of distinct process groups.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.arrays import Int32Array, IntArray
from fcp_cli.plan.step import offsets_of


def place_groups(degrees: IntArray | list[int], *, num_ranks: int, ranks_per_node: int) -> tuple[IntArray, Int32Array]:
    """Place groups on disjoint ranks.

    Args:
        degrees: [groups] ranks of each group; at most `num_ranks` in total.
        num_ranks, ranks_per_node: ranks r with equal r // ranks_per_node share a node; the last node may be smaller.

    Returns:
        rank_offsets [groups + 1] and ranks: group i has `ranks[rank_offsets[i]:rank_offsets[i + 1]]`, ascending.
    """
    wanted = np.asarray(degrees, dtype=np.int64)
    assert wanted.sum() <= num_ranks, "groups of one wave need more ranks than there are"
    nodes = _Nodes(num_ranks, ranks_per_node)
    placed: dict[int, list[int]] = {}
    by_degree = np.argsort(-wanted, kind="stable").tolist()
    large = [i for i in by_degree if wanted[i] > ranks_per_node]
    small = [i for i in by_degree if wanted[i] <= ranks_per_node]
    unplaced: list[int] = []
    for i in large:
        if ranks := nodes.take_whole_nodes(int(wanted[i])):
            placed[i] = ranks
        else:
            unplaced.append(i)
    node, last_degree = 0, 0
    for i in small:
        degree = int(wanted[i])
        # Nodes without room for this degree have none for the next group of the same degree: continue from there.
        node = nodes.first_with(degree, node if degree == last_degree else 0)
        last_degree = degree
        if ranks := nodes.take(node, degree):
            placed[i] = ranks
        else:
            unplaced.append(i)
    for i in unplaced:
        placed[i] = nodes.take_anywhere(int(wanted[i]))
    all_ranks = [rank for i in range(len(wanted)) for rank in placed[i]]
    return offsets_of(wanted), np.array(all_ranks, dtype=np.int32)


class _Nodes:
    """Free ranks of each node, always its last ones."""

    def __init__(self, num_ranks: int, ranks_per_node: int) -> None:
        first = range(0, num_ranks, ranks_per_node)
        self._next = list(first)
        self._stop = [min(rank + ranks_per_node, num_ranks) for rank in first]
        self._ranks_per_node = ranks_per_node
        self._untouched = 0  # first of the nodes that are entirely free

    def free(self, node: int) -> int:
        return self._stop[node] - self._next[node]

    def first_with(self, degree: int, start: int) -> int:
        """Return the first node from `start` on with `degree` free ranks, or the number of nodes if there is none."""
        for node in range(start, len(self._next)):
            if self.free(node) >= degree:
                return node
        return len(self._next)

    def take(self, node: int, degree: int) -> list[int]:
        """Take the next `degree` ranks of a node; none if `node` is the number of nodes."""
        if node == len(self._next):
            return []
        first = self._next[node]
        self._next[node] = first + degree
        return list(range(first, first + degree))

    def take_whole_nodes(self, degree: int) -> list[int]:
        """Take contiguous ranks from the start of an entirely free node; none if the free nodes do not suffice."""
        first_node, nodes = self._untouched, -(-degree // self._ranks_per_node)
        if first_node + nodes > len(self._next) or self._stop[first_node + nodes - 1] < self._next[first_node] + degree:
            return []
        self._untouched += nodes
        ranks: list[int] = []
        for node in range(first_node, first_node + nodes):
            ranks += self.take(node, min(self.free(node), degree - len(ranks)))
        return ranks

    def take_anywhere(self, degree: int) -> list[int]:
        """Take any free ranks, on as few nodes as possible, for a group that no longer fits better."""
        ranks: list[int] = []
        for node in sorted(range(len(self._next)), key=lambda node: (-self.free(node), node)):
            ranks += self.take(node, min(self.free(node), degree - len(ranks)))
            if len(ranks) == degree:
                break
        return sorted(ranks)
