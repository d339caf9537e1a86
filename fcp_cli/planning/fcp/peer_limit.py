"""Groups that are allowed if the peers of a rank are limited.

Groups are of neighbouring ranks, and rings of them share their pairs of ranks (`plan.ring_order`). So the pairs of all
groups there may be can be counted once, and no plan, step or resumed run exceeds that count. Groups across nodes of
only whole nodes need fewer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcp_cli.errors import UsageError
from fcp_cli.plan.ring_order import ring_pairs

_COUNTED_NODES = 10  # the pairs of nodes repeat with every fourth, and reach two nodes far


def needs_whole_nodes(max_peers: int, *, num_ranks: int, ranks_per_node: int) -> bool:
    """Return whether groups across nodes must be of whole nodes so that no rank has more peers."""
    least = num_ranks - 1
    for whole_nodes in (False, True):
        if whole_nodes and num_ranks % ranks_per_node:
            break  # the ranks of the short node would be in no ring over nodes
        least = min(least, most_peers(whole_nodes, num_ranks=num_ranks, ranks_per_node=ranks_per_node))
        if least <= max_peers:
            return whole_nodes
    raise UsageError(
        f"--max-peers is {max_peers}, but rings of all degrees on {num_ranks} ranks, {ranks_per_node} per node, need "
        f"{least}; give --max-peers {least} or more"
    )


def most_peers(whole_nodes: bool, *, num_ranks: int, ranks_per_node: int) -> int:
    """Return the peers of the rank that has most of them, over all groups that there may be."""
    num_ranks = min(num_ranks, _COUNTED_NODES * ranks_per_node + num_ranks % ranks_per_node)
    pairs: set[tuple[int, int]] = set()
    for group in _groups(whole_nodes, num_ranks, ranks_per_node):
        pairs.update(ring_pairs(tuple(group), ranks_per_node))
    # Both ranks of a pair count it; a single rank has none.
    return int(np.bincount(np.array(list(pairs), dtype=np.int64).ravel(), minlength=1).max())


def _groups(whole_nodes: bool, num_ranks: int, per_node: int) -> Iterator[range]:
    """Yield all groups of neighbouring ranks; with `whole_nodes`, those inside nodes and those of whole nodes."""
    for base in range(0, num_ranks, per_node):
        node_stop = min(base + per_node, num_ranks)
        for first in range(base, node_stop):
            most = node_stop if whole_nodes else num_ranks
            yield from (range(first, stop) for stop in range(first + 2, most + 1))
        if whole_nodes:
            yield from (range(base, stop) for stop in range(base + 2 * per_node, num_ranks + 1, per_node))
