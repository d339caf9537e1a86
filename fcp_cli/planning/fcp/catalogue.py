"""Choose few groups for all rings of a plan, for back ends that need a communicator per ring.

Ranks of a node are alike, and so are nodes: which ranks a ring gets matters little, which degrees a wave can lay side
by side matters much. A sample of steps is planned with many more groups than are allowed; those of least use are
dropped, some at a time, and the sample is planned again, until the limit holds. This is done by several measures of
use, since none is best everywhere; their choices compete on the sample with the blocks of a binary tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fcp_cli.errors import UsageError

_CHOOSING_RANKS = 256  # above, choosing among so many groups would take longer than planning
# Share of groups kept in a round; a group is worth its uses times its degree, to these powers. No rule is always best.
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
        num_ranks, ranks_per_node: the machine.
        trial: plans the sample with the given groups (widest first) only; returns its predicted seconds, and the
            micro-batches on each group.
    """
    best = tree_groups(max_groups, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    if num_ranks > _CHOOSING_RANKS:
        return best
    # A tree of halves has fewer than twice as many blocks as leaves: this is all of them.
    everything = tree_groups(2 * num_ranks, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    candidates = _widest_first([*everything, *_candidates(num_ranks, ranks_per_node)])
    (least, _), (_, all_uses) = trial(best), trial(candidates)
    # All rules begin with the same trial, of every candidate.
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
    """Return at most `max_groups` blocks of a tree over nodes and ranks, and of three, six, ... nodes; widest first.

    The tree is walked level by level from the top, so that wherever the limit falls wide rings can run on all nodes.
    """
    if max_groups < 1:
        raise UsageError(f"--max-groups is {max_groups}; at least one group, of all ranks, is needed")
    tree = tree_blocks(num_ranks, ranks_per_node)
    wide = [block for block in tree if len(block) >= ranks_per_node]
    narrow = [block for block in tree if len(block) < ranks_per_node]
    return _widest_first([*wide, *_three_quarters(num_ranks, ranks_per_node), *narrow][:max_groups])


def _by_value(groups: list[range], values: Mapping[range, int], tree: list[range]) -> list[range]:
    """Sort: all ranks, then by falling value; groups that the sample never used come last, the tree's blocks before
    others.

    Values are integers: powers of floats may differ between machines.
    """
    everyone = max(groups, key=len)
    in_tree = set(tree)

    def key(block: range) -> tuple[bool, int, bool]:
        # All ranks first, so that they stay under any limit: the longest sequence needs them.
        return block != everyone, -values[block], block not in in_tree

    return sorted(groups, key=key)


def _widest_first(groups: list[range]) -> list[range]:
    return sorted(dict.fromkeys(groups), key=lambda block: (-len(block), block.start))


def _candidates(num_ranks: int, per_node: int) -> list[range]:
    """List every degree in a node, from either end; across nodes four degrees per doubling, at starts of that grain."""
    groups = []
    for first in range(0, num_ranks, per_node):
        stop = min(first + per_node, num_ranks)
        for degree in range(2, stop - first + 1):
            # From both ends, so that groups of two degrees may share a node.
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
    """List the blocks of the tree that hold two ranks or more, level by level."""
    blocks: list[range] = []
    level = [range(num_ranks)]
    while level:
        level = [block for block in level if len(block) > 1]
        blocks += level
        level = [half for block in level for half in _halves(block, per_node)]
    return blocks


def _three_quarters(num_ranks: int, per_node: int) -> list[range]:
    """List three nodes, six, twelve, ... from the left: between the powers of two a long ring would waste most."""
    wide = []
    nodes = 3
    while nodes * per_node < num_ranks:
        wide.append(range(nodes * per_node))
        nodes *= 2
    return wide


def _halves(block: range, per_node: int) -> tuple[range, range]:
    """Cut a block of nodes in two blocks of nodes, or a node's ranks in two."""
    nodes = -(-len(block) // per_node)
    left = -(-nodes // 2) * per_node if nodes > 1 else -(-len(block) // 2)
    return block[:left], block[left:]
