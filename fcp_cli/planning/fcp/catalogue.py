"""A catalogue of few groups for all rings of a plan, for back ends that need a process group per ring.

All ranks of a node are equivalent, and so are all nodes. The choice of ranks for a ring therefore matters little; the
choice of degrees that fit side by side in a wave matters much. A sample of steps is planned with many more groups than
the limit allows. The least used groups are dropped, a fraction per round, and the sample is planned again until the
limit holds. No measure of use is best everywhere, so several are tried. Their catalogues compete on the sample with
the blocks of a binary tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fcp_cli.errors import UsageError

_CHOOSING_RANKS = 256  # above, choosing groups would take longer than planning
# (share of groups kept per round, power of a group's uses, power of its degree); the product of both is its value.
_RULES = (0.8, 1, 4), (0.8, 2, 3), (0.8, 2, 4), (0.9, 2, 2)


def choose_groups(
    max_groups: int,
    *,
    num_ranks: int,
    ranks_per_node: int,
    trial: Callable[[list[range]], tuple[float, Mapping[range, int]]],
) -> list[range]:
    """Choose at most `max_groups` groups of degree > 1, all ranks among them, widest first.

    Args:
        max_groups: the limit.
        num_ranks, ranks_per_node: the cluster.
        trial: plans the sample with only the given groups (widest first); returns its predicted seconds and the number
            of micro-batches on each group.
    """
    best = tree_groups(max_groups, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    if num_ranks > _CHOOSING_RANKS:
        return best
    # A binary tree has fewer than twice as many blocks as leaves, so this limit keeps all of them.
    everything = tree_groups(2 * num_ranks, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    candidates = _widest_first([*everything, *_candidates(num_ranks, ranks_per_node)])
    (least, _), (_, all_uses) = trial(best), trial(candidates)
    # All rules share the trial of all candidates.
    for kept, use_power, degree_power in _RULES:
        groups, seconds, uses = candidates, math.inf, all_uses
        while len(groups) > max_groups:
            keep = max(max_groups, int(len(groups) * kept))
            values = {block: uses.get(block, 0) ** use_power * len(block) ** degree_power for block in groups}
            groups = _widest_first(_by_value(groups, values, everything)[:keep])
            seconds, uses = trial(groups)
        if seconds < least:
            best, least = groups, seconds
    return best


def tree_groups(max_groups: int, *, num_ranks: int, ranks_per_node: int) -> list[range]:
    """Return at most `max_groups` blocks, widest first: of a tree over nodes and ranks, and of three, six, ... nodes.

    The tree is walked level by level from the top, so wide rings can run on all nodes under any limit.
    """
    if max_groups < 1:
        raise UsageError(f"--max-groups is {max_groups}; at least one group, of all ranks, is needed")
    tree = tree_blocks(num_ranks, ranks_per_node)
    wide = [block for block in tree if len(block) >= ranks_per_node]
    narrow = [block for block in tree if len(block) < ranks_per_node]
    return _widest_first([*wide, *_three_quarters(num_ranks, ranks_per_node), *narrow][:max_groups])


def _by_value(groups: list[range], values: Mapping[range, int], tree: list[range]) -> list[range]:
    """Sort groups by falling value, after the group of all ranks; on ties the tree's blocks come first.

    Values are integers, since powers of floats may differ between machines.
    """
    everyone = max(groups, key=len)
    in_tree = set(tree)

    def key(block: range) -> tuple[bool, int, bool]:
        # All ranks first, so that they survive any limit: the longest sequence may need them.
        return block != everyone, -values[block], block not in in_tree

    return sorted(groups, key=key)


def _widest_first(groups: list[range]) -> list[range]:
    return sorted(dict.fromkeys(groups), key=lambda block: (-len(block), block.start))


def _candidates(num_ranks: int, per_node: int) -> list[range]:
    """List the groups to choose from.

    Inside a node: every degree, from both ends. Across nodes: four degrees per doubling, with starts on the same grid.
    """
    groups = []
    for first in range(0, num_ranks, per_node):
        stop = min(first + per_node, num_ranks)
        for degree in range(2, stop - first + 1):
            # From both ends, so that groups of two degrees can share a node.
            groups += [range(start, start + degree) for start in range(first, stop - degree + 1, degree)]
            groups += [range(end - degree, end) for end in range(stop, first + degree - 1, -degree)]
    octave = per_node
    while octave < num_ranks:
        grain = max(1, octave // 4)
        for degree in range(octave + grain, min(2 * octave, num_ranks) + 1, grain):
            starts = [*range(0, num_ranks - degree + 1, grain), num_ranks - degree]
            groups += [range(start, start + degree) for start in starts]
        octave *= 2
    return groups


def tree_blocks(num_ranks: int, per_node: int) -> list[range]:
    """List the tree's blocks of two or more ranks, level by level."""
    blocks: list[range] = []
    level = [range(num_ranks)]
    while level:
        level = [block for block in level if len(block) > 1]
        blocks += level
        level = [half for block in level for half in _halves(block, per_node)]
    return blocks


def _three_quarters(num_ranks: int, per_node: int) -> list[range]:
    """List the first 3, 6, 12, ... nodes: without them, long rings between powers of two would waste the most ranks."""
    wide = []
    nodes = 3
    while nodes * per_node < num_ranks:
        wide.append(range(nodes * per_node))
        nodes *= 2
    return wide


def _halves(block: range, per_node: int) -> tuple[range, range]:
    """Split a block at a node boundary, or a block inside a node in half."""
    nodes = -(-len(block) // per_node)
    left = -(-nodes // 2) * per_node if nodes > 1 else -(-len(block) // 2)
    return block[:left], block[left:]
