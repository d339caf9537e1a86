"""One wave under `sync: microbatch`: as much work as fits into all ranks, once, by a target.

Long sequences first, each on the smallest degree that ends by the target, inside a node where one has room; ranks that
are left become groups of one rank (or two); then everything else by first-fit decreasing, into the rings too where they
have tokens and seconds to spare.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import (
    ANY_RANKS,
    NEIGHBOURS,
    NONE,
    WHOLE_NODES,
    Loads,
    Machine,
    Sequences,
    Tree,
    across_at_best,
    across_of,
    alone_seconds,
    enter_empty,
    enter_load,
    exposed_seconds,
    first_with_room,
    load_at,
    make_loads,
    make_tree,
    pack_seconds,
    padded_load,
    ring_seconds,
    set_room,
    together,
)
from fcp_cli.planning.compiled.ways import least_of_packs

_SLACK = 1e-12


class Wave(NamedTuple):
    """The groups of a wave, the ranks that they have, and what they hold.

    No array overflows: every group has a rank of its own at least, so there are at most `num_ranks` groups, and
    `num_ranks` ranks in all of them.

    Attributes:
        degree, across, loads: [num_ranks] per group; see `pack_seconds`.
        first: [num_ranks + 1] where the ranks of each group begin in `ranks`.
        ranks: [num_ranks] of the groups, back to back.
        group_of: [sequences] group of each sequence that the wave took.
        free, start: [nodes] ranks of a node that have no group yet, and where in the node they begin, side by side.
        bucket, next_node: [ranks_per_node + 1] and [nodes] nodes by free ranks, as linked lists that end with -1.
        used: [num_ranks] 1 for a rank that has a group; kept only where rings come from a catalogue.
        used_before: [num_ranks + 1] how many of the ranks before each are used.
        groups: [1] number of groups.
    """

    degree: IntArray
    across: IntArray
    loads: Loads
    first: IntArray
    ranks: IntArray
    group_of: IntArray
    free: IntArray
    start: IntArray
    bucket: IntArray
    next_node: IntArray
    used: IntArray
    used_before: IntArray
    groups: IntArray


class Pool(NamedTuple):
    """The sequences that a wave may take, those that it leaves, and what is remembered of them. All are [sequences].

    Attributes:
        waiting: the first `count` are still to be planned, by falling work.
        left_over: those that the wave filled last leaves; long ones, then others, each by falling work.
        small: those that a single rank could run; scratch of a wave.
        kept: what the best wave so far leaves.
        shortest: seconds of each sequence alone on the degree that suits it best; 0 before anybody asked.
    """

    waiting: IntArray
    left_over: IntArray
    small: IntArray
    kept: IntArray
    shortest: FloatArray


@kernel
def make_pool(sequences: int) -> Any:
    """Make a pool in which all sequences wait."""
    return Pool(
        np.arange(sequences),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(sequences),
    )


@kernel
def make_wave(sequences: int, machine: Machine) -> Any:
    """Make the arrays of a wave; `place_rings` empties them."""
    num_ranks = machine.num_ranks
    nodes = (num_ranks + machine.ranks_per_node - 1) // machine.ranks_per_node
    return Wave(
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        make_loads(num_ranks),
        np.zeros(num_ranks + 1, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(machine.ranks_per_node + 1, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks + 1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@leaf
def _reset(machine: Machine, wave: Wave) -> None:
    """Empty the wave: no group, all ranks free."""
    wave.groups[0] = 0
    wave.first[0] = 0
    wave.used[:] = 0
    wave.used_before[:] = 0
    wave.bucket[:] = -1
    wave.start[:] = 0
    for node in range(len(wave.free) - 1, -1, -1):
        wave.free[node] = min(machine.ranks_per_node, machine.num_ranks - node * machine.ranks_per_node)
        _list_by_free_ranks(node, wave)


@inlined
def _list_by_free_ranks(node: int, wave: Wave) -> None:
    """Enter a node into the list of the nodes with as many free ranks."""
    wave.next_node[node] = wave.bucket[wave.free[node]]
    wave.bucket[wave.free[node]] = node


@leaf
def _take_from_node(free: int, degree: int, from_right: bool, wave: Wave, machine: Machine) -> int:
    """Give the group being made up to `degree` ranks of the first node with `free` free ones; return how many."""
    node = wave.bucket[free]
    wave.bucket[free] = wave.next_node[node]
    taken = min(free, degree)
    _take_ranks(node, taken, from_right, wave, machine)
    return int(taken)


@leaf
def _take_ranks(node: int, taken: int, from_right: bool, wave: Wave, machine: Machine) -> None:
    """Give the group being made free ranks of a node, which is in no list, from either end of them."""
    g = wave.groups[0]
    first = node * machine.ranks_per_node + wave.start[node]
    if from_right:
        first += wave.free[node] - taken
    else:
        wave.start[node] += taken
    for k in range(taken):
        wave.ranks[wave.first[g + 1] + k] = first + k
    wave.first[g + 1] += taken
    wave.free[node] -= taken
    _list_by_free_ranks(node, wave)


@leaf
def _best_fit(degree: int, machine: Machine, wave: Wave) -> int:
    """Return the smallest number of free ranks >= degree that some node has, or 0."""
    for free in range(degree, machine.ranks_per_node + 1):
        if wave.bucket[free] >= 0:
            return free
    return 0


@leaf
def _free_run(degree: int, machine: Machine, wave: Wave) -> Any:
    """Find neighbours for a group across nodes: whether some are free, the first node, and how many of its ranks.

    Wholly free nodes are the last ones, since they are taken from the left; the short node of a machine comes after
    them. The node before them may have its last ranks free, which belong to the run where the group fills no whole
    nodes: that leaves one node less in pieces. Where no node is wholly free, what two neighbours have left may lie
    side by side: groups inside nodes are taken from the left of even and from the right of odd ones.
    """
    per_node = machine.ranks_per_node
    whole, rest = degree // per_node, degree % per_node
    stop, short = machine.num_ranks // per_node, machine.num_ranks % per_node
    first = wave.bucket[per_node]
    if rest and machine.placement == WHOLE_NODES:
        return False, 0, 0
    if first < 0:
        return _free_pair(degree, machine, wave)
    before = (
        wave.free[first - 1] if first > 0 and rest and wave.start[first - 1] + wave.free[first - 1] == per_node else 0
    )
    if 0 < before < degree and first + (degree - before + per_node - 1) // per_node <= stop:
        return True, first - 1, before
    if whole > 0 and first + whole + (1 if rest else 0) <= stop:
        return True, first, per_node
    reaches = whole > 0 and first + whole == stop and rest <= short and wave.bucket[short] == stop
    return reaches, first, per_node


@leaf
def _free_pair(degree: int, machine: Machine, wave: Wave) -> Any:
    """Find two neighbouring nodes whose free ranks lie side by side and suffice, with the fewest to spare."""
    per_node = machine.ranks_per_node
    chosen, spare = -1, per_node * 2
    if machine.placement == NEIGHBOURS and degree < 2 * per_node:
        for node in range(len(wave.free) - 1):
            left, right = wave.free[node], wave.free[node + 1]
            reach = left > 0 and right > 0 and wave.start[node] + left == per_node and wave.start[node + 1] == 0
            if reach and 0 <= left + right - degree < spare:
                chosen, spare = node, left + right - degree
    return chosen >= 0, chosen, wave.free[chosen] if chosen >= 0 else 0


@leaf
def _take_run(node: int, taken: int, degree: int, wave: Wave, machine: Machine) -> None:
    """Give the group being made the last `taken` free ranks of a node, and those of the nodes behind it."""
    missing = degree
    while missing:
        _unlist(node, wave)
        _take_ranks(node, taken, taken < wave.free[node] and missing == degree, wave, machine)
        missing -= taken
        node += 1
        taken = min(missing, machine.ranks_per_node)


@leaf
def _unlist(node: int, wave: Wave) -> None:
    """Take a node out of the list that it is in."""
    free = wave.free[node]
    if wave.bucket[free] == node:
        wave.bucket[free] = wave.next_node[node]
        return
    before = wave.bucket[free]
    while wave.next_node[before] != node:
        before = wave.next_node[before]
    wave.next_node[before] = wave.next_node[node]


@leaf
def _open_group(degree: int, inside: int, machine: Machine, wave: Wave) -> int:
    """Make a group of `degree` ranks, in a node with `inside` free ranks, or over nodes where `inside` is 0.

    The caller has counted that so many ranks are free, which is what ends the search for nodes with any.
    """
    g = wave.groups[0]
    wave.first[g + 1] = wave.first[g]
    if inside:
        from_right = machine.placement == NEIGHBOURS and wave.bucket[inside] % 2 == 1
        _take_from_node(inside, degree, from_right, wave, machine)
    elif machine.placement != ANY_RANKS:
        _found, node, taken = _free_run(degree, machine, wave)
        _take_run(node, min(taken, degree), degree, wave, machine)
    missing = 0 if inside or machine.placement != ANY_RANKS else degree
    while missing:
        free = _best_fit(missing, machine, wave) if missing < machine.ranks_per_node else 0
        if free == 0:
            free = machine.ranks_per_node
            while wave.bucket[free] < 0:
                free -= 1
        missing -= _take_from_node(free, missing, False, wave, machine)
    wave.degree[g] = degree
    wave.across[g] = 0 if inside else across_of(wave.ranks[wave.first[g] : wave.first[g + 1]], machine)
    enter_empty(g, wave.loads)
    wave.groups[0] = g + 1
    return int(g)


@leaf
def _add(i: int, g: int, sequences: Sequences, machine: Machine, wave: Wave) -> None:
    """Let group g run sequence i, too."""
    enter_load(g, together(load_at(g, wave.loads), padded_load(i, wave.degree[g], sequences, machine)), wave.loads)
    wave.group_of[i] = g


@leaf
def _place_ring(i: int, target: float, left: int, sequences: Sequences, machine: Machine, wave: Wave) -> int:
    """Put a long sequence on the smallest degree that ends by target; return it, or 0 where no rank is left for it."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    lowest = max(2, (tokens + machine.tokens_per_rank - 1) // machine.tokens_per_rank)
    lowest = max(lowest, int(np.ceil((attention + linear) / (target - machine.beta) - 1e-9)))
    # Degrees far above the work's share only pay where the ring is exposed: a matter for the wave's first ring alone.
    highest = left if wave.groups[0] == 0 else min(left, 12 * lowest + 8)
    for degree in range(lowest, highest + 1):
        inside = _best_fit(degree, machine, wave)
        if machine.placement != ANY_RANKS and not inside and not _free_run(degree, machine, wave)[0]:
            continue
        across = 0 if inside else 1  # pieces of nodes; or, where a node is free, whole nodes and a rest
        if across and degree > machine.ranks_per_node and wave.bucket[machine.ranks_per_node] >= 0:
            across = across_at_best(degree, machine)
        if alone_seconds(i, degree, across, sequences, machine) <= target + _SLACK:
            _add(i, _open_group(degree, inside, machine, wave), sequences, machine, wave)
            return degree
    return 0


@leaf
def _place_in_catalogue(i: int, target: float, sequences: Sequences, machine: Machine, wave: Wave) -> int:
    """Put a long sequence on the narrowest free group of the catalogue that ends by target; return its degree, or 0.

    Of several groups of one degree it takes the one that leaves the shortest runs of free ranks beside it.
    """
    tokens, chosen, degree, tightest = sequences.tokens[i], -1, 0, 0
    for s in range(len(machine.group_first) - 2, -1, -1):
        width = machine.group_first[s + 1] - machine.group_first[s]
        if chosen >= 0 and width > degree:
            break
        if width * machine.tokens_per_rank < tokens:
            continue
        if alone_seconds(i, width, across_at_best(width, machine), sequences, machine) > target + _SLACK:
            continue
        first = machine.group_ranks[machine.group_first[s]]
        if wave.used_before[first + width] > wave.used_before[first]:
            continue
        low, high = 0, machine.num_ranks
        if width <= machine.ranks_per_node:
            low = first - first % machine.ranks_per_node
            high = min(high, low + machine.ranks_per_node)
        before, after = _free_beside(first, first + width, low, high, wave.used)
        run = (before + after) * machine.num_ranks + min(before, after)
        if chosen < 0 or run < tightest:
            chosen, degree, tightest = s, width, run
    if chosen >= 0:
        ranks = machine.group_ranks[machine.group_first[chosen] : machine.group_first[chosen + 1]]
        _add(i, _open_on(ranks, machine, wave), sequences, machine, wave)
        for rank in range(ranks[0], machine.num_ranks):
            wave.used_before[rank + 1] = wave.used_before[rank] + wave.used[rank]
    return degree


@leaf
def _free_beside(first: int, stop: int, low: int, high: int, used: IntArray) -> Any:
    """Count the free ranks right before and right after the ranks first..stop, as far as low..high."""
    before, after = first, stop
    while before > low and used[before - 1] == 0:
        before -= 1
    while after < high and used[after] == 0:
        after += 1
    return first - before, after - stop


@leaf
def _open_on(ranks: IntArray, machine: Machine, wave: Wave) -> int:
    """Make a group of the given ranks."""
    g = wave.groups[0]
    for k in range(len(ranks)):
        wave.ranks[wave.first[g] + k] = ranks[k]
        wave.used[ranks[k]] = 1
    wave.first[g + 1] = wave.first[g] + len(ranks)
    wave.degree[g] = len(ranks)
    wave.across[g] = across_of(ranks, machine)
    enter_empty(g, wave.loads)
    wave.groups[0] = g + 1
    return int(g)


@inlined
def _free_seconds(g: int, target: float, machine: Machine, wave: Wave) -> float:
    """Return the rank-seconds that group g has left, where attention hides of its ring what it can."""
    degree, tokens, across = wave.degree[g], wave.loads.tokens[g], wave.across[g]
    exposed, chunks = 0.0, 0.0
    if degree > 1 and len(machine.splits.lies):
        exposed = least_of_packs(1.0, tokens, 1.0, degree, across, machine)
    elif degree > 1:
        ring = ring_seconds(tokens, degree, across, machine)
        exposed = exposed_seconds(ring, tokens, degree, across, machine)
        chunks = machine.chunk * tokens * (degree - 1)
    computed = degree * (target - machine.beta - exposed)
    return float(computed - wave.loads.attention[g] - wave.loads.linear[g] - chunks)


@leaf
def _update_room(g: int, target: float, machine: Machine, tree: Tree, wave: Wave) -> None:
    """Bring the tree up to date with what group g has left."""
    set_room(
        tree,
        g,
        _free_seconds(g, target, machine, wave),
        wave.degree[g] * machine.tokens_per_rank - wave.loads.tokens[g],
    )


@leaf
def _group_for(i: int, target: float, sequences: Sequences, machine: Machine, tree: Tree, wave: Wave) -> int:
    """Return the first group that can take sequence i and still end by target, or NONE."""
    work, tokens = sequences.work[i], sequences.tokens[i]
    g = first_with_room(tree, work - _SLACK, tokens, 0)
    while g != NONE:
        if wave.degree[g] == 1:
            return g
        pack = together(load_at(g, wave.loads), padded_load(i, wave.degree[g], sequences, machine))
        if pack_seconds(pack, wave.degree[g], wave.across[g], machine) <= target + _SLACK:
            return g
        g = first_with_room(tree, work - _SLACK, tokens, g + 1)
    return NONE


@leaf
def place_rings(target: float, count: int, pool: Pool, sequences: Sequences, machine: Machine, wave: Wave) -> Any:
    """Begin a wave: give the sequences that no single rank can run by the target rings, as far as ranks last.

    Refused is work of sequences for which there were ranks enough, only not at a degree that ends by the target: they
    will cost a later wave as much as they would have cost this one.

    Returns:
        How many sequences are in `pool.left_over`, and in `pool.small`; ranks left; work refused.
    """
    _reset(machine, wave)
    ranks_left = machine.num_ranks
    rest, small = 0, 0
    refused = 0.0
    for k in range(count):
        i = pool.waiting[k]
        if sequences.tokens[i] <= machine.tokens_per_rank and machine.beta + sequences.work[i] <= target + _SLACK:
            pool.small[small] = i
            small += 1
            continue
        if ranks_left < 2:
            degree = 0
        elif len(machine.group_first) > 1:
            degree = _place_in_catalogue(i, target, sequences, machine, wave)
        else:
            degree = _place_ring(i, target, ranks_left, sequences, machine, wave)
        ranks_left -= degree
        if degree == 0:
            pool.left_over[rest] = i
            rest += 1
            if ranks_left * machine.tokens_per_rank >= sequences.tokens[i] and (
                ranks_left * (target - machine.beta) >= sequences.work[i]
            ):
                refused += sequences.work[i]
    return rest, small, ranks_left, refused


@leaf
def _group_free_ranks(pair: bool, machine: Machine, wave: Wave) -> None:
    """Make groups of two, or of one, of the ranks that rings left."""
    for free in range(machine.ranks_per_node, 0, -1):
        while wave.bucket[free] >= 0:
            node_free = free
            while node_free:
                degree = 2 if pair and node_free >= 2 else 1
                _open_group(degree, node_free, machine, wave)
                node_free -= degree


@kernel
def _group_free_ranks_of_catalogue(pair: bool, machine: Machine, wave: Wave) -> None:
    """Do the same where rings keep to a catalogue, which says which two ranks may be a group."""
    if pair:
        for s in range(len(machine.group_first) - 1):
            ranks = machine.group_ranks[machine.group_first[s] : machine.group_first[s + 1]]
            if len(ranks) == 2 and wave.used[ranks[0]] == 0 and wave.used[ranks[1]] == 0:
                _open_on(ranks, machine, wave)
    for rank in range(machine.num_ranks):
        if wave.used[rank] == 0:
            _open_on(np.array([rank]), machine, wave)


@leaf
def outlook(target: float, count: int, pool: Pool, sequences: Sequences, machine: Machine, wave: Wave) -> Any:
    """Return what a wave would leave, were small sequences a fluid: work, tokens, refused work, longest or -1."""
    rest, small, ranks_left, refused = place_rings(target, count, pool, sequences, machine, wave)
    work, tokens = 0.0, 0
    longest = pool.left_over[0] if rest else -1
    for k in range(rest):
        work += sequences.work[pool.left_over[k]]
        tokens += sequences.tokens[pool.left_over[k]]
    seconds = ranks_left * (target - machine.beta)
    room = ranks_left * machine.tokens_per_rank
    for g in range(wave.groups[0]):
        degree = wave.degree[g]
        free_tokens = degree * machine.tokens_per_rank - wave.loads.tokens[g]
        ring = machine.inter if wave.across[g] else machine.intra
        hidden = (1.0 - machine.exposed) * ring * (degree - 1) * wave.loads.tokens[g]
        if hidden < wave.loads.attention[g] or len(machine.splits.lies):
            seconds += _free_seconds(g, target, machine, wave)
            room += free_tokens
    for k in range(small):
        i = pool.small[k]
        if sequences.work[i] <= seconds and sequences.tokens[i] <= room:
            seconds -= sequences.work[i]
            room -= sequences.tokens[i]
        else:
            work += sequences.work[i]
            tokens += sequences.tokens[i]
            if longest < 0:
                longest = i
    return work, tokens, refused, longest


@leaf
def _fill_groups(
    target: float, rest: int, small: int, tree: Tree, pool: Pool, sequences: Sequences, machine: Machine, wave: Wave
) -> int:
    """Lay the sequences that a single rank could run where they fit first; return how many are left over."""
    for g in range(wave.groups[0]):
        _update_room(g, target, machine, tree, wave)
    for k in range(small):
        i = pool.small[k]
        g = _group_for(i, target, sequences, machine, tree, wave)
        if g == NONE:
            pool.left_over[rest] = i
            rest += 1
        else:
            _add(i, g, sequences, machine, wave)
            _update_room(g, target, machine, tree, wave)
    return rest


@kernel
def fill_wave(
    target: float, pair: bool, count: int, pool: Pool, sequences: Sequences, machine: Machine, wave: Wave
) -> int:
    """Fill a wave from the sequences that wait: rings, then the others by falling work, each where it fits first.

    Args:
        target: seconds by which all groups end.
        pair: whether the ranks that rings leave go in groups of two, where a node has two, or one by one.
        count: sequences that wait in the pool.

    Returns:
        How many sequences are left over, in `pool.left_over`.
    """
    rest, small, _ranks_left, _refused = place_rings(target, count, pool, sequences, machine, wave)
    if len(machine.group_first) > 1:
        _group_free_ranks_of_catalogue(pair, machine, wave)
    else:
        _group_free_ranks(pair, machine, wave)
    return _fill_groups(target, rest, small, make_tree(wave.groups[0]), pool, sequences, machine, wave)


@leaf
def wave_seconds(machine: Machine, wave: Wave) -> float:
    """Return the seconds of the slowest group of the wave, or the least that a wave takes."""
    slowest = machine.floor
    for g in range(wave.groups[0]):
        if wave.loads.tokens[g]:
            seconds = pack_seconds(load_at(g, wave.loads), wave.degree[g], wave.across[g], machine)
            slowest = max(slowest, seconds)
    return slowest
