"""A wave under `sync: microbatch`: one micro-batch on each group, with as much work as fits by a target.

Long sequences come first, each on the smallest degree that ends by the target, inside a node if one has room. The
remaining ranks form groups of a given width. All other sequences are packed first-fit decreasing, also into rings that
have tokens and seconds to spare.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import (
    NONE,
    Loads,
    PlannerInputs,
    Sequences,
    across_at_best,
    across_of,
    alone_seconds,
    enter_empty,
    enter_load,
    load_at,
    make_loads,
    pack_seconds,
    padded_load,
    recomputation_seconds,
    recomputation_slope,
    together,
)
from fcp_cli.planning.compiled.room_tree import Tree, first_with_room, make_tree, set_room, usable_seconds
from fcp_cli.planning.compiled.waves.free_ranks import (
    SLACK,
    FreeRanks,
    best_fit,
    first_across,
    first_in_catalogue,
    first_inside,
    free_all,
    make_free_ranks,
    take,
)
from fcp_cli.planning.compiled.waves.pool import Pool
from fcp_cli.planning.compiled.ways import least_of_packs, traffic_of

_MARGIN = 1e-9  # relative; keeps rounding on the safe side


class Wave(NamedTuple):
    """The groups of a wave, with their ranks and packs.

    No array overflows: groups are disjoint, so there are at most `num_ranks` of them.

    Attributes:
        degree, first: [num_ranks] degree and first rank of each group.
        across, loads: [num_ranks] of each group; see `pack_seconds`.
        group_of: [sequences] group of each sequence that the wave takes.
        groups: [1] number of groups.
        ranks: the ranks without a group.
    """

    degree: IntArray
    first: IntArray
    across: IntArray
    loads: Loads
    group_of: IntArray
    groups: IntArray
    ranks: FreeRanks


@kernel
def make_wave(sequences: int, inputs: PlannerInputs) -> Any:
    """Allocate the arrays of a wave; `place_rings` resets them."""
    num_ranks = inputs.num_ranks
    return Wave(
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        make_loads(num_ranks),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        make_free_ranks(inputs),
    )


@leaf
def _open_group(first: int, degree: int, inputs: PlannerInputs, wave: Wave) -> int:
    """Add an empty group on `degree` ranks from `first` on; return its number."""
    g = wave.groups[0]
    wave.first[g], wave.degree[g], wave.across[g] = first, degree, across_of(first, degree, inputs)
    enter_empty(g, wave.loads)
    wave.groups[0] = g + 1
    return int(g)


@leaf
def _add(i: int, g: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> None:
    """Add sequence i to the pack of group g."""
    enter_load(g, together(load_at(g, wave.loads), padded_load(i, wave.degree[g], sequences, inputs)), wave.loads)
    wave.group_of[i] = g


@leaf
def _place_ring(i: int, target: float, left: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> int:
    """Place a long sequence on the smallest degree that ends by target; return the degree, or 0 if none fits."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    lowest = max(2, (tokens + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)
    # Fewer ranks cannot do the work in time; 1e-9 keeps rounding from adding a rank.
    lowest = max(lowest, int(np.ceil((attention + linear) / (target - inputs.prices.beta) - 1e-9)))
    # Degrees far above the least only pay if the ring is exposed; they are only tried for the wave's first ring.
    highest = left if wave.groups[0] == 0 else min(left, 12 * lowest + 8)
    for degree in range(lowest, highest + 1):
        inside = best_fit(degree, inputs, wave.ranks)
        # At least 1: no node has room, so even a narrow group crosses nodes.
        at_best = 0 if inside else max(across_at_best(degree, inputs), 1)
        # Price first, since placement needs a search.
        if alone_seconds(i, degree, at_best, sequences, inputs) > target + SLACK:
            continue
        first = first_inside(degree, inside, wave.ranks) if inside else first_across(degree, inputs, wave.ranks)
        if first == NONE:
            # Wider groups do not fit either.
            if degree >= wave.ranks.too_wide[0]:
                return 0
            continue
        across = across_of(first, degree, inputs)
        # With Ulysses sets, the actual placement may cost more than the best.
        if across != at_best and alone_seconds(i, degree, across, sequences, inputs) > target + SLACK:
            continue
        take(first, degree, inputs, wave.ranks)
        _add(i, _open_group(first, degree, inputs, wave), sequences, inputs, wave)
        return degree
    return 0


@leaf
def _place_in_catalogue(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> int:
    """Place a long sequence on the narrowest free catalogue group that ends by target; return its degree, or 0."""
    first, degree = first_in_catalogue(i, target, sequences, inputs, wave.ranks)
    if first != NONE:
        _add(i, _open_in_catalogue(first, degree, inputs, wave), sequences, inputs, wave)
        # Prefix sums, so that testing whether a group is free takes constant time.
        for rank in range(first, inputs.num_ranks):
            wave.ranks.used_before[rank + 1] = wave.ranks.used_before[rank] + wave.ranks.used[rank]
    return int(degree)


@leaf
def _open_in_catalogue(first: int, degree: int, inputs: PlannerInputs, wave: Wave) -> int:
    """Add a group of the catalogue; return its number."""
    for rank in range(first, first + degree):
        wave.ranks.used[rank] = 1
    return int(_open_group(first, degree, inputs, wave))


@inlined
def _free_seconds(g: int, target: float, inputs: PlannerInputs, wave: Wave) -> float:
    """Return the free rank-seconds of group g, if as much of its ring is hidden as possible."""
    degree, tokens, across = wave.degree[g], wave.loads.tokens[g], wave.across[g]
    # A lower bound of the exposed ring, so that the tree never hides a group with room.
    exposed = least_of_packs(1.0, tokens, 1.0, degree, across, inputs) if degree > 1 else 0.0
    again = recomputation_seconds(tokens, degree, inputs.prices)
    computed = degree * (target - inputs.prices.beta - exposed - again)
    return float(computed - wave.loads.attention[g] - wave.loads.linear[g])


@leaf
def _update_room(i: int, g: int, target: float, pool: Pool, inputs: PlannerInputs, tree: Tree, wave: Wave) -> None:
    """Update the free seconds and tokens of group g in the tree, as seen by sequence i and lighter ones."""
    degree, held = wave.degree[g], wave.loads.tokens[g]
    tokens = degree * inputs.tokens_per_rank - held
    free = _free_seconds(g, target, inputs, wave)
    again = recomputation_slope(held / degree, inputs.prices)
    if degree > 1:
        # A ring that outlasts its attention has no time for many tokens. Without this limit, the tree would offer it to
        # all sequences.
        traffic, growth = traffic_of(held, degree, wave.across[g], inputs)
        seconds = degree * (target * (1.0 + _MARGIN) - inputs.prices.beta - traffic) - wave.loads.linear[g]
        per_token = pool.thin[0] + degree * growth
        if seconds < per_token * tokens:
            tokens = int(np.ceil(max(0.0, seconds / per_token)))
    if again > 0.0 and free > 0.0:
        # Less the least recomputation of further tokens, for the same reason.
        free *= (1.0 + _MARGIN) / (1.0 + again / pool.density[i])
    set_room(tree, g, usable_seconds(free, tokens, pool.most, inputs), tokens)


@leaf
def _group_for(
    i: int, target: float, pool: Pool, sequences: Sequences, inputs: PlannerInputs, tree: Tree, wave: Wave
) -> int:
    """Return the first group that can take sequence i and still end by target, or NONE."""
    work, tokens = sequences.work[i], sequences.tokens[i]
    g = first_with_room(tree, work - SLACK, tokens, 0)
    while g != NONE:
        # The tree is exact for single ranks without recomputation, and an upper bound otherwise.
        if wave.degree[g] == 1 and inputs.prices.again[0, 0] == 0.0:
            return g
        pack = together(load_at(g, wave.loads), padded_load(i, wave.degree[g], sequences, inputs))
        if pack_seconds(pack, wave.degree[g], wave.across[g], inputs) <= target + SLACK:
            return g
        if inputs.prices.again[0, 0] > 0.0:
            _update_room(i, g, target, pool, inputs, tree, wave)
        g = first_with_room(tree, work - SLACK, tokens, g + 1)
    return NONE


@leaf
def _is_small(i: int, target: float, width: int, sequences: Sequences, inputs: PlannerInputs) -> bool:
    """Return whether a single rank, or a group of `width` > 2 ranks, can run the sequence by the target."""
    if sequences.tokens[i] <= inputs.tokens_per_rank:
        again = recomputation_seconds(sequences.tokens[i], 1, inputs.prices)
        if inputs.prices.beta + sequences.work[i] + again <= target + SLACK:
            return True
    if width <= 2 or sequences.tokens[i] > width * inputs.tokens_per_rank:
        return False
    return bool(alone_seconds(i, width, 0, sequences, inputs) <= target + SLACK)


@leaf
def place_rings(
    target: float, width: int, count: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave
) -> Any:
    """Start a wave: place rings for the sequences that need one (`_is_small`), as long as there are ranks.

    Work is refused if enough ranks were left for its sequence, but no group of them ends by the target. It will cost a
    later wave as much as it would have cost this one.

    Returns:
        The numbers of sequences in `pool.left_over` and `pool.small`, the number of ranks left, and the refused work.
    """
    wave.groups[0] = 0
    free_all(inputs, wave.ranks)
    ranks_left = inputs.num_ranks
    rest, small = 0, 0
    refused = 0.0
    for k in range(count):
        i = pool.waiting[k]
        if _is_small(i, target, width, sequences, inputs):
            pool.small[small] = i
            small += 1
            continue
        if ranks_left < 2:
            degree = 0
        elif len(inputs.group_first):
            degree = _place_in_catalogue(i, target, sequences, inputs, wave)
        else:
            degree = _place_ring(i, target, ranks_left, sequences, inputs, wave)
        ranks_left -= degree
        if degree == 0:
            pool.left_over[rest] = i
            rest += 1
            if ranks_left * inputs.tokens_per_rank >= sequences.tokens[i] and (
                ranks_left * (target - inputs.prices.beta) >= sequences.work[i]
            ):
                refused += sequences.work[i]
    return rest, small, ranks_left, refused


@leaf
def _group_free_ranks(width: int, inputs: PlannerInputs, wave: Wave) -> None:
    """Make groups of `width` ranks, or fewer at the end of a node, of the ranks that rings left free."""
    for free in range(inputs.ranks_per_node, 0, -1):
        # Uses up the first node of the list, which removes it.
        while wave.ranks.bucket[free] >= 0:
            node_free = free
            while node_free:
                degree = min(width, node_free)
                first = first_inside(degree, node_free, wave.ranks)
                take(first, degree, inputs, wave.ranks)
                _open_group(first, degree, inputs, wave)
                node_free -= degree


@leaf
def _group_free_ranks_of_catalogue(width: int, inputs: PlannerInputs, wave: Wave) -> None:
    """Make groups like `_group_free_ranks`, but only of `width` ranks in the catalogue, and else single ranks."""
    for group in range(len(inputs.group_first) if width > 1 else 0):
        first, taken = inputs.group_first[group], 0
        if inputs.group_degree[group] != width:
            continue
        for rank in range(first, first + width):
            taken += wave.ranks.used[rank]
        if taken == 0:
            _open_in_catalogue(first, width, inputs, wave)
    for rank in range(inputs.num_ranks):
        if wave.ranks.used[rank] == 0:
            _open_in_catalogue(rank, 1, inputs, wave)


@leaf
def outlook(target: float, count: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> Any:
    """Estimate the remainder of a wave, with small sequences as a fluid over all free ranks.

    Return work, tokens and refused work, and the longest remaining sequence or -1.
    """
    rest, small, ranks_left, refused = place_rings(target, 1, count, pool, sequences, inputs, wave)
    work, tokens = 0.0, 0
    longest = pool.left_over[0] if rest else -1
    for k in range(rest):
        work += pool.least[pool.left_over[k]]
        tokens += sequences.tokens[pool.left_over[k]]
    seconds = ranks_left * (target - inputs.prices.beta)
    room = ranks_left * inputs.tokens_per_rank
    for g in range(wave.groups[0]):
        degree = wave.degree[g]
        free_tokens = degree * inputs.tokens_per_rank - wave.loads.tokens[g]
        ring = inputs.prices.ring[1 if wave.across[g] else 0]
        hidden = (1.0 - inputs.prices.exposed) * ring * (degree - 1) * wave.loads.tokens[g]
        # If the ring outlasts its attention, every further token lengthens the pack, so it has no room.
        if hidden < wave.loads.attention[g] or len(inputs.splits.heads):
            seconds += _free_seconds(g, target, inputs, wave)
            room += free_tokens
    for k in range(small):
        i = pool.small[k]
        # Smaller ones may still fit after one that does not.
        if sequences.work[i] <= seconds and sequences.tokens[i] <= room:
            seconds -= sequences.work[i]
            room -= sequences.tokens[i]
        else:
            work += pool.least[i]
            tokens += sequences.tokens[i]
            # By falling work, so the first that is left is the longest.
            if longest < 0:
                longest = i
    return work, tokens, refused, longest


@leaf
def _fill_groups(
    target: float,
    rest: int,
    small: int,
    tree: Tree,
    pool: Pool,
    sequences: Sequences,
    inputs: PlannerInputs,
    wave: Wave,
) -> int:
    """Pack the small sequences first-fit into all groups; return the number of sequences left over."""
    # Rings have the lowest numbers, so small sequences fill their room before that of single ranks.
    if small == 0:
        return rest
    for g in range(wave.groups[0]):
        _update_room(pool.small[0], g, target, pool, inputs, tree, wave)
    for k in range(small):
        i = pool.small[k]
        g = _group_for(i, target, pool, sequences, inputs, tree, wave)
        if g == NONE:
            pool.left_over[rest] = i
            rest += 1
        else:
            _add(i, g, sequences, inputs, wave)
            _update_room(i, g, target, pool, inputs, tree, wave)
    return rest


@kernel
def fill_wave(
    target: float, width: int, count: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave
) -> int:
    """Fill a wave from the waiting sequences: rings, then the others first-fit by falling work.

    Args:
        target: seconds by which all groups end.
        width: degree of the groups on ranks that rings leave free; smaller if nodes are.
        count: number of waiting sequences in the pool.

    Returns:
        The number of sequences left over, in `pool.left_over`.
    """
    width = min(width, inputs.ranks_per_node)
    rest, small, _ranks_left, _refused = place_rings(target, width, count, pool, sequences, inputs, wave)
    if len(inputs.group_first):
        _group_free_ranks_of_catalogue(width, inputs, wave)
    else:
        _group_free_ranks(width, inputs, wave)
    return _fill_groups(target, rest, small, make_tree(wave.groups[0]), pool, sequences, inputs, wave)


@leaf
def wave_seconds(inputs: PlannerInputs, wave: Wave) -> float:
    """Return the seconds of the wave: those of its slowest group, but at least the floor."""
    slowest = inputs.floor
    for g in range(wave.groups[0]):
        if wave.loads.tokens[g]:
            seconds = pack_seconds(load_at(g, wave.loads), wave.degree[g], wave.across[g], inputs)
            slowest = max(slowest, seconds)
    return slowest
