"""Which ranks may be a group where the peers of a rank are limited.

Rings of neighbouring ranks share their pairs of ranks (`plan.ring_order`), so the limit is kept by placement: groups
inside a node are of neighbours, and wider ones are of neighbouring nodes. The pairs of all such groups are the same for
every plan, so no plan, step or resumed run can exceed the count made here once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcp_cli.errors import UsageError
from fcp_cli.plan.ring_order import ring_pairs
from fcp_cli.planning.compiled.core import ANY_RANKS, NEIGHBOURS, WHOLE_NODES

_COUNTED_NODES = 10  # the pairs of nodes repeat with every fourth, and reach two nodes far


def placement_for(max_peers: int, *, num_ranks: int, ranks_per_node: int) -> int:
    """Return the freest placement of groups under which no rank has more peers; see `core.ANY_RANKS`.

    Raises:
        UsageError: no placement of rings of all degrees has so few.
    """
    if max_peers >= num_ranks - 1:
        return ANY_RANKS
    least = num_ranks
    for placement in (NEIGHBOURS, WHOLE_NODES):
        if placement == WHOLE_NODES and num_ranks % ranks_per_node:
            break  # the ranks of the short node would be in no ring over nodes
        most = most_peers(placement, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
        if most <= max_peers:
            return placement
        least = min(least, most)
    raise UsageError(
        f"--max-peers is {max_peers}, but rings of all degrees on {num_ranks} ranks, {ranks_per_node} per node, need "
        f"{least}; give --max-peers {least} or more"
    )


def most_peers(placement: int, *, num_ranks: int, ranks_per_node: int) -> int:
    """Return the peers of the rank that has most of them, over all groups that a placement allows."""
    num_ranks = min(num_ranks, _COUNTED_NODES * ranks_per_node + num_ranks % ranks_per_node)
    pairs: set[tuple[int, int]] = set()
    for group in _groups(placement, num_ranks, ranks_per_node):
        pairs.update(ring_pairs(tuple(group), ranks_per_node))
    return int(np.bincount(np.array(list(pairs), dtype=np.int64).ravel(), minlength=1).max())


def _groups(placement: int, num_ranks: int, per_node: int) -> Iterator[range]:
    """Yield the groups of neighbours inside each node, then those across nodes, from the first rank of one on."""
    for base in range(0, num_ranks, per_node):
        node_stop = min(base + per_node, num_ranks)
        for first in range(base, node_stop):
            inside = num_ranks if placement == NEIGHBOURS else node_stop
            yield from (range(first, stop) for stop in range(first + 2, inside + 1))
        if placement == WHOLE_NODES:
            yield from (range(base, stop) for stop in range(base + 2 * per_node, num_ranks + 1, per_node))
