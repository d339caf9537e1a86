"""A catalogue of few groups for all rings of a plan, for back ends that need a process group per ring.

All ranks of a node are equivalent, and so are all nodes. The choice of ranks for a ring therefore matters little; the
choice of degrees that fit side by side in a wave matters much. A sample of steps is planned with many more groups than
the limit allows. The least used groups are dropped, a fraction per round, and the sample is planned again until the
limit holds. No measure of use is best everywhere, so several are tried. Their catalogues compete on the sample with
the blocks of a binary tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from fcp_cli.errors import UsageError
from fcp_cli.plan.rings import ring_pairs
from fcp_cli.plan.simulation.microbatches import ORDERS, parts_of, places
from fcp_cli.plan.step import offsets_of, sizes_of
from fcp_cli.planning.problem import Assignment, Problem
from fcp_cli.util.arrays import FloatArray, IntArray

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


# Groups allowed under a limit on the peers of a rank.
#
# A group consists of neighbouring ranks, and rings of different groups reuse the same pairs of ranks
# (`plan.rings.ring_order`). The pairs of all possible groups are therefore counted once, and no plan, step or resumed
# run exceeds that count. Restricting groups across nodes to whole nodes lowers it.

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


# Orders of the waves of a pipelined step.
#
# While the longest micro-batch passes through the pipeline and back, the first stage runs forwards of later micro-
# batches and backwards of earlier ones. The step therefore pays at least the forward of each earlier micro-batch and
# the backward of each later one. More of them belong before the longest than after it, with the long ones next to it
# and the short ones at both ends.


def wave_orders(waves: Assignment, seconds: FloatArray, problem: Problem) -> Iterator[IntArray]:
    """Yield other orders of the same waves, as [microbatches] the new wave of each.

    Every order rises to the longest wave, then falls; the orders differ in the waves after the longest. Ranks that no
    ring connects are ordered independently. Under `iteration`, waves in which some rank has no work stay last: anywhere
    else, replicas could wait for each other in a cycle.

    Args:
        waves: a step.
        seconds: [microbatches] of each.
        problem: the problem of the step.
    """
    count = int(waves.wave.max()) + 1
    degrees = sizes_of(waves.rank_offsets)
    parts = parts_of(problem.num_ranks, waves.rank_offsets, waves.ranks)
    part = parts[waves.ranks[waves.rank_offsets[:-1]]]
    # [parts, waves]: parts are sets of ranks that no ring connects to others.
    lasts = np.zeros((int(parts.max()) + 1, count))
    np.maximum.at(lasts, (part, waves.wave), seconds)
    held = np.zeros(lasts.shape, dtype=np.int64)
    np.add.at(held, (part, waves.wave), degrees)
    is_whole = (
        held == np.bincount(parts)[:, None] if problem.sync == "iteration" else np.ones_like(held, dtype=np.bool_)
    )
    # The caller simulates each order, which costs far more than this comparison.
    known = {waves.wave.astype(np.int64).tobytes()}
    for kind in range(ORDERS):
        place = places(kind, lasts, is_whole)[part, waves.wave]
        if place.tobytes() not in known:
            known.add(place.tobytes())
            yield place


def reordered(assignment: Assignment, place: IntArray) -> Assignment:
    """Return the assignment with its micro-batches moved to the waves `place`."""
    order = np.argsort(place, kind="stable")
    ranks, degrees = _taken(assignment.ranks.astype(np.int64), assignment.rank_offsets, order)
    members, sizes = _taken(assignment.members, assignment.member_offsets, order)
    return Assignment(
        wave=place[order].astype(np.int32),
        rank_offsets=degrees,
        ranks=ranks.astype(np.int32),
        member_offsets=sizes,
        members=members,
    )


def _taken(values: IntArray, offsets: IntArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """Return back-to-back lists in another order, and their new offsets."""
    sizes = sizes_of(offsets)[order]
    new = offsets_of(sizes)
    # Vectorized gather: old position = new position + (old start - new start) of its list.
    return values[np.repeat(offsets[:-1][order] - new[:-1], sizes) + np.arange(new[-1])], new
