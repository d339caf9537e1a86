"""Groups allowed under a limit on the peers of a rank.

A group consists of neighbouring ranks, and rings of different groups reuse the same pairs of ranks
(`plan.ring_order`). The pairs of all possible groups are therefore counted once, and no plan, step or resumed run
exceeds that count. Restricting groups across nodes to whole nodes lowers it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcp_cli.errors import UsageError
from fcp_cli.plan.ring_order import ring_pairs

_COUNTED_NODES = 10  # enough: pairs across nodes repeat every four nodes, and span at most two


def needs_whole_nodes(max_peers: int, *, num_ranks: int, ranks_per_node: int) -> bool:
    """Return whether groups across nodes must consist of whole nodes to respect `max_peers`."""
    least = num_ranks - 1
    for whole_nodes in (False, True):
        if whole_nodes and num_ranks % ranks_per_node:
            break  # the ranks of the short last node would be in no ring across nodes
        least = min(least, most_peers(whole_nodes, num_ranks=num_ranks, ranks_per_node=ranks_per_node))
        if least <= max_peers:
            return whole_nodes
    raise UsageError(
        f"--max-peers is {max_peers}, but rings of all degrees on {num_ranks} ranks, {ranks_per_node} per node, need "
        f"{least}; give --max-peers {least} or more"
    )


def most_peers(whole_nodes: bool, *, num_ranks: int, ranks_per_node: int) -> int:
    """Return the largest number of peers of any rank, over all possible groups."""
    num_ranks = min(num_ranks, _COUNTED_NODES * ranks_per_node + num_ranks % ranks_per_node)
    pairs: set[tuple[int, int]] = set()
    for group in _groups(whole_nodes, num_ranks, ranks_per_node):
        pairs.update(ring_pairs(tuple(group), ranks_per_node))
    # Each pair counts for both of its ranks; `minlength` covers a single rank, which has none.
    return int(np.bincount(np.array(list(pairs), dtype=np.int64).ravel(), minlength=1).max())


def _groups(whole_nodes: bool, num_ranks: int, per_node: int) -> Iterator[range]:
    """Yield all groups of neighbouring ranks; with `whole_nodes`, only those inside a node or of whole nodes."""
    for base in range(0, num_ranks, per_node):
        node_stop = min(base + per_node, num_ranks)
        for first in range(base, node_stop):
            most = node_stop if whole_nodes else num_ranks
            yield from (range(first, stop) for stop in range(first + 2, most + 1))
        if whole_nodes:
            yield from (range(base, stop) for stop in range(base + 2 * per_node, num_ranks + 1, per_node))
