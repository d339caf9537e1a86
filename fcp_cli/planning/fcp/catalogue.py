"""Few rank sets for all rings of a plan, for back ends that need a communicator per ring.

The sets are blocks of a binary tree over the ranks: all ranks, halves down to whole nodes, then halves inside a node
down to pairs. Any two of them are nested or disjoint, so they pack without waste. The tree
is walked level by level from the top, so that wherever the limit falls wide rings can run on all nodes. Three nodes,
six, twelve, ... from the left are added before the first set that is narrower than a node.
"""

from __future__ import annotations

import numpy as np

from fcp_cli.errors import UsageError
from fcp_cli.plan.step import Int64Array


def rank_sets(max_groups: int, *, num_ranks: int, ranks_per_node: int) -> list[range]:
    """At most `max_groups` rank sets of degree > 1, widest first.

    Raises:
        UsageError: no set is allowed, yet a sequence may need more than one rank.
    """
    if max_groups < 1:
        raise UsageError(f"--max-groups is {max_groups}; at least one group, of all ranks, is needed")
    tree = _by_level(num_ranks, ranks_per_node)
    wide = [block for block in tree if len(block) >= ranks_per_node]
    narrow = [block for block in tree if len(block) < ranks_per_node]
    sets = list(dict.fromkeys([*wide, *_three_quarters(num_ranks, ranks_per_node), *narrow]))
    return sorted(sets[:max_groups], key=lambda block: (-len(block), block.start))


def _by_level(num_ranks: int, per_node: int) -> list[range]:
    """The blocks of the tree that hold two ranks or more, level by level."""
    blocks: list[range] = []
    level = [range(num_ranks)]
    while level:
        level = [block for block in level if len(block) > 1]
        blocks += level
        level = [half for block in level for half in _halves(block, per_node)]
    return blocks


def _three_quarters(num_ranks: int, per_node: int) -> list[range]:
    """Three nodes, six, twelve, ... from the left: between the powers of two a long ring would waste most."""
    wide = []
    nodes = 3
    while nodes * per_node < num_ranks:
        wide.append(range(nodes * per_node))
        nodes *= 2
    return wide


def flat(sets: list[range], num_ranks: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The sets back to back (offsets, ranks), and which degrees they have ([num_ranks + 1], 1 or 0)."""
    first = np.concatenate(([0], np.cumsum([len(block) for block in sets], dtype=np.int64)))
    ranks = np.concatenate([np.arange(block.start, block.stop) for block in sets]).astype(np.int64)
    allowed = np.zeros(num_ranks + 1, dtype=np.int64)
    allowed[[1, *(len(block) for block in sets)]] = 1
    return first, ranks, allowed


def _halves(block: range, per_node: int) -> tuple[range, range]:
    """A block of nodes in two blocks of nodes, a node's ranks in two."""
    nodes = -(-len(block) // per_node)
    left = -(-nodes // 2) * per_node if nodes > 1 else -(-len(block) // 2)
    return block[:left], block[left:]
