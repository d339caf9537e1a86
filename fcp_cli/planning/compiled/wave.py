"""A wave under `sync: microbatch`: one micro-batch on each group, with as much work as fits by a target.

`fill_wave` fills one from the pool of waiting sequences:

    long sequences first, each on the smallest degree that ends by the target,    place_rings
        inside a node if one has room
    make groups of a given width of the ranks left                                _group_free_ranks
    pack all other sequences first-fit decreasing, also into rings that have      _fill_groups
        tokens and seconds to spare

`outlook` estimates what a wave leaves without packing the small sequences. The free ranks of a node are contiguous,
since groups take them from either end; nodes are in linked lists by their number of free ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.certificate import work_in_rings
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
    least_degree,
    least_of_packs,
    load_at,
    make_loads,
    pack_seconds,
    padded_load,
    recomputation_seconds,
    recomputation_slope,
    together,
    traffic_of,
)
from fcp_cli.planning.compiled.room_tree import (
    Tree,
    first_with_room,
    make_tree,
    most_work,
    set_room,
    usable_seconds,
)
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf

_MARGIN = 1e-9  # relative; keeps rounding on the safe side
# Seconds: sums that are equal on paper may differ in their last bits, which must not cost a rank or a wave.
SLACK = 1e-12


class Wave(NamedTuple):
    """The groups of a wave, with their ranks and packs.

    No array overflows: groups are disjoint, so there are at most `num_ranks` of them.

    Attributes:
        degree, first: [num_ranks] degree and first rank of each group.
        across, loads: [num_ranks] of each group; see `pack_seconds`.
        group_of: [sequences] group of each sequence that the wave takes.
        groups: [1] number of groups.
        ranks: the ranks without a group.
        pool: the sequences that no wave has taken yet.
    """

    degree: IntArray
    first: IntArray
    across: IntArray
    loads: Loads
    group_of: IntArray
    groups: IntArray
    ranks: FreeRanks
    pool: Pool


class Pool(NamedTuple):
    """Sequences that a wave may take or has left, and precomputed values; arrays are [sequences] if not stated.

    Attributes:
        waiting: sequences still to be planned, by falling work; entries beyond `num_waiting` are unused.
        num_waiting: [1] number of waiting sequences.
        left_over: sequences left by the wave filled last: long ones, then others, each by falling work.
        small: sequences that need no ring; scratch space of a wave.
        kept: sequences left by the best wave so far.
        shortest: seconds of each sequence alone on its best degree; 0 until computed.
        least: rank-seconds of each sequence in the narrowest ring that holds it; see `work_in_rings`.
        most: [tokens] see `room_tree.most_work`.
        thin: [1] least linear seconds per token of any sequence.
        density: largest work per token of this or any lighter sequence.
    """

    waiting: IntArray
    num_waiting: IntArray
    left_over: IntArray
    small: IntArray
    kept: IntArray
    shortest: FloatArray
    least: FloatArray
    most: FloatArray
    thin: FloatArray
    density: FloatArray


class FreeRanks(NamedTuple):
    """The free ranks of each node.

    Attributes:
        free, start: [nodes] number of free ranks, and the first of them.
        bucket: [ranks_per_node + 1] first node with each number of free ranks, or -1.
        next_node, before_node: [nodes] doubly linked list of the nodes with equally many free ranks; -1 at the ends.
        used: [num_ranks] 1 for a rank that has a group; only maintained if rings come from a catalogue.
        used_before: [num_ranks + 1] prefix sums of `used`.
        too_wide: [1] least degree for which no run of free ranks across nodes was found. Free ranks only become fewer
            while a wave is filled, so wider groups need no search.
    """

    free: IntArray
    start: IntArray
    bucket: IntArray
    next_node: IntArray
    before_node: IntArray
    used: IntArray
    used_before: IntArray
    too_wide: IntArray


@kernel
def make_wave(sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Allocate the arrays of a wave, which `place_rings` resets, and make a pool in which all sequences wait."""
    num_ranks = inputs.num_ranks
    return Wave(
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        make_loads(num_ranks),
        np.zeros(len(sequences.work), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        make_free_ranks(inputs),
        _make_pool(sequences, inputs),
    )


@kernel
def _make_pool(sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make a pool in which all sequences wait."""
    n, thin = len(sequences.work), np.full(1, np.inf)
    density, waiting = np.zeros(n), np.zeros(n, dtype=np.int64)
    # A running maximum from the lightest on.
    for i in range(n - 1, -1, -1):
        waiting[i] = i
        thin[0] = min(thin[0], sequences.linear[i] / sequences.tokens[i])
        density[i] = max(sequences.work[i] / sequences.tokens[i], density[i + 1] if i + 1 < n else 0.0)
    return Pool(
        waiting,
        np.full(1, n),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        np.zeros(n),
        work_in_rings(np.inf, sequences, inputs),
        most_work(sequences, inputs),
        thin,
        density,
    )


@kernel
def make_free_ranks(inputs: PlannerInputs) -> Any:
    """Allocate the arrays; `free_all` initializes them."""
    nodes = (inputs.num_ranks + inputs.ranks_per_node - 1) // inputs.ranks_per_node
    return FreeRanks(
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(inputs.ranks_per_node + 1, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(inputs.num_ranks, dtype=np.int64),
        np.zeros(inputs.num_ranks + 1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@leaf
def wait_for_next(rest: IntArray, count: int, pool: Pool) -> None:
    """Let the sequences rest[:count] of the pool wait for the next wave, and no others."""
    for k in range(count):
        pool.waiting[k] = rest[k]
    pool.num_waiting[0] = count


@kernel
def fill_wave(target: float, width: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> int:
    """Fill a wave from the waiting sequences: rings, then the others first-fit by falling work.

    Args:
        target: seconds by which all groups end.
        width: degree of the groups on ranks that rings leave free; smaller if nodes are.
        sequences, inputs: the sequences by falling work, and the ranks.
        wave: the wave, with the waiting sequences in its pool.

    Returns:
        The number of sequences left over, in `wave.pool.left_over`.
    """
    width = min(width, inputs.ranks_per_node)
    rest, small, _ranks_left, _refused = place_rings(target, width, sequences, inputs, wave)
    if len(inputs.group_first):
        _group_free_ranks_of_catalogue(width, inputs, wave)
    else:
        _group_free_ranks(width, inputs, wave)
    return _fill_groups(target, rest, small, make_tree(wave.groups[0]), sequences, inputs, wave)


@leaf
def outlook(target: float, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> Any:
    """Estimate the remainder of a wave, with small sequences as a fluid over all free ranks.

    Return work, tokens and refused work, and the longest remaining sequence or -1.
    """
    pool = wave.pool
    rest, small, ranks_left, refused = place_rings(target, 1, sequences, inputs, wave)
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
def wave_seconds(inputs: PlannerInputs, wave: Wave) -> float:
    """Return the seconds of the wave: those of its slowest group, but at least the floor."""
    slowest = inputs.floor
    for g in range(wave.groups[0]):
        if wave.loads.tokens[g]:
            seconds = pack_seconds(load_at(g, wave.loads), wave.degree[g], wave.across[g], inputs)
            slowest = max(slowest, seconds)
    return slowest


@leaf
def place_rings(target: float, width: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> Any:
    """Start a wave: place rings for the sequences that need one (`_is_small`), as long as there are ranks.

    Work is refused if enough ranks were left for its sequence, but no group of them ends by the target. It will cost a
    later wave as much as it would have cost this one.

    Returns:
        The numbers of sequences in `left_over` and `small` of the pool, the number of ranks left, and the refused work.
    """
    pool = wave.pool
    wave.groups[0] = 0
    free_all(inputs, wave.ranks)
    ranks_left = inputs.num_ranks
    rest, small = 0, 0
    refused = 0.0
    for k in range(pool.num_waiting[0]):
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
def _place_ring(i: int, target: float, left: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> int:
    """Place a long sequence on the smallest degree that ends by target; return the degree, or 0 if none fits."""
    attention, linear = sequences.attention[i], sequences.linear[i]
    lowest = max(2, least_degree(i, sequences, inputs))
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
def _open_group(first: int, degree: int, inputs: PlannerInputs, wave: Wave) -> int:
    """Add an empty group on `degree` ranks from `first` on; return its number."""
    g = wave.groups[0]
    wave.first[g], wave.degree[g], wave.across[g] = first, degree, across_of(first, degree, inputs)
    enter_empty(g, wave.loads)
    wave.groups[0] = g + 1
    return int(g)


@leaf
def _open_in_catalogue(first: int, degree: int, inputs: PlannerInputs, wave: Wave) -> int:
    """Add a group of the catalogue; return its number."""
    for rank in range(first, first + degree):
        wave.ranks.used[rank] = 1
    return int(_open_group(first, degree, inputs, wave))


@leaf
def _add(i: int, g: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> None:
    """Add sequence i to the pack of group g."""
    enter_load(g, together(load_at(g, wave.loads), padded_load(i, wave.degree[g], sequences, inputs)), wave.loads)
    wave.group_of[i] = g


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
def _fill_groups(
    target: float,
    rest: int,
    small: int,
    tree: Tree,
    sequences: Sequences,
    inputs: PlannerInputs,
    wave: Wave,
) -> int:
    """Pack the small sequences first-fit into all groups; return the number of sequences left over."""
    # Rings have the lowest numbers, so small sequences fill their room before that of single ranks.
    pool = wave.pool
    if small == 0:
        return rest
    for g in range(wave.groups[0]):
        _update_room(pool.small[0], g, target, inputs, tree, wave)
    for k in range(small):
        i = pool.small[k]
        g = _group_for(i, target, sequences, inputs, tree, wave)
        if g == NONE:
            pool.left_over[rest] = i
            rest += 1
        else:
            _add(i, g, sequences, inputs, wave)
            _update_room(i, g, target, inputs, tree, wave)
    return rest


@leaf
def _group_for(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, tree: Tree, wave: Wave) -> int:
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
            _update_room(i, g, target, inputs, tree, wave)
        g = first_with_room(tree, work - SLACK, tokens, g + 1)
    return NONE


@leaf
def _update_room(i: int, g: int, target: float, inputs: PlannerInputs, tree: Tree, wave: Wave) -> None:
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
        per_token = wave.pool.thin[0] + degree * growth
        if seconds < per_token * tokens:
            tokens = int(np.ceil(max(0.0, seconds / per_token)))
    if again > 0.0 and free > 0.0:
        # Less the least recomputation of further tokens, for the same reason.
        free *= (1.0 + _MARGIN) / (1.0 + again / wave.pool.density[i])
    set_room(tree, g, usable_seconds(free, tokens, wave.pool.most, inputs), tokens)


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
def free_all(inputs: PlannerInputs, ranks: FreeRanks) -> None:
    """Free all ranks."""
    ranks.too_wide[0] = inputs.num_ranks + 1
    ranks.used[:] = 0
    ranks.used_before[:] = 0
    ranks.bucket[:] = -1
    for node in range(len(ranks.free) - 1, -1, -1):  # backwards, so that lists start with the first node
        ranks.start[node] = node * inputs.ranks_per_node
        ranks.free[node] = min(inputs.ranks_per_node, inputs.num_ranks - node * inputs.ranks_per_node)
        _list_by_free_ranks(node, ranks)


@leaf
def best_fit(degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> int:
    """Return the smallest number of free ranks >= degree that some node has, or 0."""
    # Best fit, which leaves the emptiest nodes to wider groups.
    for free in range(degree, inputs.ranks_per_node + 1):
        if ranks.bucket[free] >= 0:
            return free
    return 0


@leaf
def first_inside(degree: int, free: int, ranks: FreeRanks) -> int:
    """Return the first rank for a group inside the first node that has exactly `free` free ranks.

    Odd nodes are filled from the right, even ones from the left, so that the ranks left in two successive nodes can be
    neighbours, for a group across both.
    """
    node = ranks.bucket[free]
    return int(ranks.start[node] + (ranks.free[node] - degree if node % 2 else 0))


@leaf
def first_across(degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> int:
    """Return the first rank for a group on the shortest run of free ranks that holds it, or NONE."""
    per_node = inputs.ranks_per_node
    if degree >= ranks.too_wide[0] or (inputs.whole_nodes and degree % per_node):
        return NONE
    chosen, shortest = NONE, inputs.num_ranks + 1
    run, stop = 0, 0  # the run that ends before rank `stop`
    # One more iteration than nodes, so that the last run ends like any other.
    for node in range(len(ranks.free) + 1):
        free = ranks.free[node] if node < len(ranks.free) else 0
        # Under a limit of peers, groups across nodes must consist of whole nodes, so a node in use breaks the run.
        if inputs.whole_nodes and free < per_node:
            free = 0
        if free and ranks.start[node] == stop:
            stop += free
            continue
        if degree <= stop - run < shortest:
            shortest = stop - run
            chosen = _first_in_run(run, stop, degree, inputs)
        if free:
            run, stop = ranks.start[node], ranks.start[node] + free
        else:
            run, stop = 0, 0
    if chosen == NONE:
        ranks.too_wide[0] = degree
    return chosen


@inlined
def _first_in_run(run: int, stop: int, degree: int, inputs: PlannerInputs) -> int:
    """Return the first rank for a group in the free ranks run..stop: at a node if it fills whole nodes, else at `run`.

    A group that splits a node anyway then uses the ranks left by another one, so free ranks stay in few pieces.
    """
    per_node = inputs.ranks_per_node
    node = (run + per_node - 1) // per_node * per_node
    return node if degree % per_node == 0 and node + degree <= stop else run


@leaf
def take(first: int, degree: int, inputs: PlannerInputs, ranks: FreeRanks) -> None:
    """Mark `degree` ranks from `first` on as used; on each node they must be at either end of the free ranks."""
    stop = first + degree
    while first < stop:
        node = first // inputs.ranks_per_node
        taken = min(stop, ranks.start[node] + ranks.free[node]) - first
        _unlist(node, ranks)
        # At the left end the first free rank moves; at the right end only the number changes.
        if first == ranks.start[node]:
            ranks.start[node] += taken
        ranks.free[node] -= taken
        _list_by_free_ranks(node, ranks)
        first += taken


@inlined
def _list_by_free_ranks(node: int, ranks: FreeRanks) -> None:
    """Insert a node at the head of the list for its number of free ranks."""
    after = ranks.bucket[ranks.free[node]]
    ranks.next_node[node], ranks.before_node[node] = after, -1
    if after >= 0:
        ranks.before_node[after] = node
    ranks.bucket[ranks.free[node]] = node


@leaf
def _unlist(node: int, ranks: FreeRanks) -> None:
    """Remove a node from its list."""
    before, after = ranks.before_node[node], ranks.next_node[node]
    if before >= 0:
        ranks.next_node[before] = after
    else:
        ranks.bucket[ranks.free[node]] = after
    if after >= 0:
        ranks.before_node[after] = before


@leaf
def first_in_catalogue(i: int, target: float, sequences: Sequences, inputs: PlannerInputs, ranks: FreeRanks) -> Any:
    """Return first rank (or NONE) and degree of the narrowest free group of the catalogue that can run i by target.

    Among groups of one degree, choose the one with the shortest runs of free ranks on both sides.
    """
    tokens, chosen, degree, tightest = sequences.tokens[i], NONE, 0, 0
    for group in range(len(inputs.group_first) - 1, -1, -1):
        first, width = inputs.group_first[group], inputs.group_degree[group]
        # Narrowest first: a wider group would only take ranks that other sequences need.
        if chosen != NONE and width > degree:
            break
        if width * inputs.tokens_per_rank < tokens:
            continue
        if alone_seconds(i, width, across_at_best(width, inputs), sequences, inputs) > target + SLACK:
            continue
        if ranks.used_before[first + width] > ranks.used_before[first]:
            continue
        low, high = 0, inputs.num_ranks
        # Next to a group inside a node, only runs inside that node count.
        if width <= inputs.ranks_per_node:
            low = first - first % inputs.ranks_per_node
            high = min(high, low + inputs.ranks_per_node)
        before, after = _free_beside(first, first + width, low, high, ranks.used)
        # By the total, then by the shorter side: a single long run holds more groups than two short ones.
        run = (before + after) * inputs.num_ranks + min(before, after)
        if chosen == NONE or run < tightest:
            chosen, degree, tightest = first, width, run
    return chosen, degree


@leaf
def _free_beside(first: int, stop: int, low: int, high: int, used: IntArray) -> Any:
    """Return the numbers of free ranks right before and right after the ranks first..stop, within low..high."""
    before, after = first, stop
    while before > low and used[before - 1] == 0:
        before -= 1
    while after < high and used[after] == 0:
        after += 1
    return first - before, after - stop
