"""One wave under `sync: microbatch`: as much work as fits into all ranks, once, by a target.

Long sequences first, each on the smallest degree that ends by the target, inside a node where one has room; ranks that
are left become bins of one rank (or two); then everything else by first-fit decreasing, into the rings too where they
have tokens and seconds to spare.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.plan.step import FloatArray, Int64Array
from fcp_cli.planning.compiled.compiling import inlined, kernel
from fcp_cli.planning.compiled.core import (
    NO_BIN,
    Machine,
    Sequences,
    Tree,
    alone_seconds,
    first_with_room,
    make_tree,
    pack_seconds,
    padded_for,
    ring_seconds,
    set_room,
)

_SLACK = 1e-12


class Wave(NamedTuple):
    """Bins of a wave, one per group, and the ranks they have.

    Attributes:
        degree, crosses, attention, linear, tokens, first: [ranks (+ 1)] per bin; first counts into `ranks`.
        ranks: [num_ranks].
        item_bin: [sequences] bin of each sequence that the wave took.
        free: [nodes] ranks of a node that have no group yet; they are its last ones.
        bucket, next_node: nodes by free ranks, as linked lists.
        used: [num_ranks] 1 for a rank that has a group; kept only where rings come from a catalogue.
        bins: [1] number of bins.
    """

    degree: Int64Array
    crosses: Int64Array
    attention: FloatArray
    linear: FloatArray
    tokens: Int64Array
    first: Int64Array
    ranks: Int64Array
    item_bin: Int64Array
    free: Int64Array
    bucket: Int64Array
    next_node: Int64Array
    used: Int64Array
    used_before: Int64Array
    bins: Int64Array


@kernel
def make_wave(sequences: int, machine: Machine) -> Any:
    num_ranks = machine.num_ranks
    nodes = (num_ranks + machine.per_node - 1) // machine.per_node
    return Wave(
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks),
        np.zeros(num_ranks),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks + 1, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(machine.per_node + 1, dtype=np.int64),
        np.zeros(nodes, dtype=np.int64),
        np.zeros(num_ranks, dtype=np.int64),
        np.zeros(num_ranks + 1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@kernel
def _reset(machine: Machine, wave: Wave) -> None:
    wave.bins[0] = 0
    wave.first[0] = 0
    wave.used[:] = 0
    wave.used_before[:] = 0
    wave.bucket[:] = -1
    for node in range(len(wave.free) - 1, -1, -1):
        wave.free[node] = min(machine.per_node, machine.num_ranks - node * machine.per_node)
        _hang(node, wave)


@inlined
def _hang(node: int, wave: Wave) -> None:
    """Enter a node into the list of its free ranks."""
    wave.next_node[node] = wave.bucket[wave.free[node]]
    wave.bucket[wave.free[node]] = node


@kernel
def _draw(free: int, degree: int, wave: Wave, machine: Machine) -> int:
    """Give the group being made up to `degree` ranks of the first node with so many free; how many it got."""
    node = wave.bucket[free]
    wave.bucket[free] = wave.next_node[node]
    taken = min(free, degree)
    size = min(machine.per_node, machine.num_ranks - node * machine.per_node)
    b = wave.bins[0]
    for k in range(taken):
        wave.ranks[wave.first[b + 1] + k] = node * machine.per_node + size - free + k
    wave.first[b + 1] += taken
    wave.free[node] = free - taken
    _hang(node, wave)
    return int(taken)


@kernel
def _best_fit(degree: int, machine: Machine, wave: Wave) -> int:
    """The smallest number of free ranks >= degree that some node has, or 0."""
    for free in range(degree, machine.per_node + 1):
        if wave.bucket[free] >= 0:
            return free
    return 0


@kernel
def _open_bin(degree: int, inside: int, machine: Machine, wave: Wave) -> int:
    """Make a group of `degree` ranks: in a node with `inside` free ranks, or over nodes where inside is 0."""
    b = wave.bins[0]
    wave.first[b + 1] = wave.first[b]
    if inside:
        _draw(inside, degree, wave, machine)
    missing = 0 if inside else degree
    while missing:
        free = _best_fit(missing, machine, wave) if missing < machine.per_node else 0
        if free == 0:
            free = machine.per_node
            while wave.bucket[free] < 0:
                free -= 1
        missing -= _draw(free, missing, wave, machine)
    wave.degree[b] = degree
    wave.crosses[b] = 0 if inside else 1
    wave.attention[b], wave.linear[b], wave.tokens[b] = 0.0, 0.0, 0
    wave.bins[0] = b + 1
    return int(b)


@kernel
def _lay(i: int, b: int, sequences: Sequences, machine: Machine, wave: Wave) -> None:
    attention, linear, tokens = padded_for(
        sequences.attention[i], sequences.linear[i], sequences.tokens[i], wave.degree[b], machine
    )
    wave.attention[b] += attention
    wave.linear[b] += linear
    wave.tokens[b] += tokens
    wave.item_bin[i] = b


@kernel
def _place_ring(i: int, target: float, left: int, sequences: Sequences, machine: Machine, wave: Wave) -> int:
    """Put a long sequence on the smallest degree that ends by target; the degree, or 0 where none left does."""
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    lowest = max(2, (tokens + machine.budget - 1) // machine.budget)
    lowest = max(lowest, int(np.ceil((attention + linear) / (target - machine.beta) - 1e-9)))
    # Degrees far above the work's share only pay where the ring is exposed: a matter for the wave's first ring alone.
    highest = left if wave.bins[0] == 0 else min(left, 12 * lowest + 8)
    for degree in range(lowest, highest + 1):
        inside = _best_fit(degree, machine, wave)
        if alone_seconds(attention, linear, tokens, degree, inside == 0, machine) <= target + _SLACK:
            _lay(i, _open_bin(degree, inside, machine, wave), sequences, machine, wave)
            return degree
    return 0


@kernel
def _place_in_catalogue(i: int, target: float, sequences: Sequences, machine: Machine, wave: Wave) -> int:
    """Put a long sequence on the narrowest free rank set that ends by target; its degree, or 0.

    Of several sets of one degree, that which leaves the shortest runs of free ranks beside it.
    """
    attention, linear, tokens = sequences.attention[i], sequences.linear[i], sequences.tokens[i]
    chosen, degree, tightest = -1, 0, 0
    for s in range(len(machine.set_first) - 2, -1, -1):
        width = machine.set_first[s + 1] - machine.set_first[s]
        if chosen >= 0 and width > degree:
            break
        if width * machine.budget < tokens:
            continue
        if alone_seconds(attention, linear, tokens, width, width > machine.per_node, machine) > target + _SLACK:
            continue
        first = machine.set_ranks[machine.set_first[s]]
        if wave.used_before[first + width] > wave.used_before[first]:
            continue
        low, high = 0, machine.num_ranks
        if width <= machine.per_node:
            low = first - first % machine.per_node
            high = min(high, low + machine.per_node)
        before, after = _free_beside(first, first + width, low, high, wave.used)
        run = (before + after) * machine.num_ranks + min(before, after)
        if chosen < 0 or run < tightest:
            chosen, degree, tightest = s, width, run
    if chosen >= 0:
        ranks = machine.set_ranks[machine.set_first[chosen] : machine.set_first[chosen + 1]]
        _lay(i, _open_on(ranks, machine, wave), sequences, machine, wave)
        for rank in range(ranks[0], machine.num_ranks):
            wave.used_before[rank + 1] = wave.used_before[rank] + wave.used[rank]
    return degree


@kernel
def _free_beside(first: int, stop: int, low: int, high: int, used: Int64Array) -> Any:
    """Free ranks right before and right after the ranks first..stop, as far as low..high."""
    before, after = first, stop
    while before > low and used[before - 1] == 0:
        before -= 1
    while after < high and used[after] == 0:
        after += 1
    return first - before, after - stop


@kernel
def _open_on(ranks: Int64Array, machine: Machine, wave: Wave) -> int:
    """Make a group of the given ranks."""
    b = wave.bins[0]
    for k in range(len(ranks)):
        wave.ranks[wave.first[b] + k] = ranks[k]
        wave.used[ranks[k]] = 1
    wave.first[b + 1] = wave.first[b] + len(ranks)
    wave.degree[b] = len(ranks)
    wave.crosses[b] = 1 if len(ranks) > machine.per_node else 0
    wave.attention[b], wave.linear[b], wave.tokens[b] = 0.0, 0.0, 0
    wave.bins[0] = b + 1
    return int(b)


@inlined
def _free_seconds(b: int, target: float, machine: Machine, wave: Wave) -> float:
    """Rank-seconds that bin b has left, where attention hides of its ring what it can."""
    degree = wave.degree[b]
    exposed = machine.exposed * ring_seconds(wave.tokens[b], degree, wave.crosses[b] > 0, machine)
    return float(degree * (target - machine.beta - exposed) - wave.attention[b] - wave.linear[b])


@kernel
def _room(b: int, target: float, machine: Machine, tree: Tree, wave: Wave) -> None:
    """Tell the tree what bin b has left."""
    set_room(tree, b, _free_seconds(b, target, machine, wave), wave.degree[b] * machine.budget - wave.tokens[b])


@kernel
def _bin_for(i: int, target: float, sequences: Sequences, machine: Machine, tree: Tree, wave: Wave) -> int:
    """The first bin that can take sequence i and still end by target, or NO_BIN."""
    work, tokens = sequences.work[i], sequences.tokens[i]
    b = first_with_room(tree, work - _SLACK, tokens, 0)
    while b != NO_BIN:
        if wave.degree[b] == 1:
            return b
        attention, linear, padded = padded_for(
            sequences.attention[i], sequences.linear[i], tokens, wave.degree[b], machine
        )
        seconds = pack_seconds(
            wave.attention[b] + attention,
            wave.linear[b] + linear,
            wave.tokens[b] + padded,
            wave.degree[b],
            wave.crosses[b] > 0,
            machine,
        )
        if seconds <= target + _SLACK:
            return b
        b = first_with_room(tree, work - _SLACK, tokens, b + 1)
    return NO_BIN


@kernel
def place_rings(
    target: float,
    alive: Int64Array,
    count: int,
    left_over: Int64Array,
    later: Int64Array,
    sequences: Sequences,
    machine: Machine,
    wave: Wave,
) -> Any:
    """Rings of a wave: (sequences left over, small sequences, listed in later, ranks left, work refused).

    Refused is work of sequences for which there were ranks enough, only not at a degree that ends by the target: they
    will cost a later wave as much as they would have cost this one.
    """
    _reset(machine, wave)
    ranks_left = machine.num_ranks
    rest, small = 0, 0
    refused = 0.0
    for k in range(count):
        i = alive[k]
        if sequences.tokens[i] <= machine.budget and machine.beta + sequences.work[i] <= target + _SLACK:
            later[small] = i
            small += 1
            continue
        if ranks_left < 2:
            degree = 0
        elif len(machine.set_first) > 1:
            degree = _place_in_catalogue(i, target, sequences, machine, wave)
        else:
            degree = _place_ring(i, target, ranks_left, sequences, machine, wave)
        ranks_left -= degree
        if degree == 0:
            left_over[rest] = i
            rest += 1
            if ranks_left * machine.budget >= sequences.tokens[i] and (
                ranks_left * (target - machine.beta) >= sequences.work[i]
            ):
                refused += sequences.work[i]
    return rest, small, ranks_left, refused


@kernel
def outlook(
    target: float,
    alive: Int64Array,
    count: int,
    left_over: Int64Array,
    later: Int64Array,
    sequences: Sequences,
    machine: Machine,
    wave: Wave,
) -> Any:
    """What a wave would leave, were small sequences a fluid: (work, tokens, work refused, longest left or -1)."""
    rest, small, ranks_left, refused = place_rings(target, alive, count, left_over, later, sequences, machine, wave)
    work, tokens = 0.0, 0
    longest = left_over[0] if rest else -1
    for k in range(rest):
        work += sequences.work[left_over[k]]
        tokens += sequences.tokens[left_over[k]]
    seconds = ranks_left * (target - machine.beta)
    room = ranks_left * machine.budget
    for b in range(wave.bins[0]):
        degree = wave.degree[b]
        free_tokens = degree * machine.budget - wave.tokens[b]
        ring = machine.inter if wave.crosses[b] else machine.intra
        if (1.0 - machine.exposed) * ring * (degree - 1) * wave.tokens[b] < wave.attention[b]:
            seconds += _free_seconds(b, target, machine, wave)
            room += free_tokens
    for k in range(small):
        i = later[k]
        if sequences.work[i] <= seconds and sequences.tokens[i] <= room:
            seconds -= sequences.work[i]
            room -= sequences.tokens[i]
        else:
            work += sequences.work[i]
            tokens += sequences.tokens[i]
            if longest < 0:
                longest = i
    return work, tokens, refused, longest


@kernel
def fill_wave(
    target: float,
    pair: bool,
    alive: Int64Array,
    count: int,
    left_over: Int64Array,
    later: Int64Array,
    sequences: Sequences,
    machine: Machine,
    wave: Wave,
) -> int:
    """Fill a wave from the sequences alive[:count]; those left go to left_over. How many are left."""
    rest, small, _ranks_left, _refused = place_rings(target, alive, count, left_over, later, sequences, machine, wave)
    if len(machine.set_first) > 1:
        if pair:
            for s in range(len(machine.set_first) - 1):
                ranks = machine.set_ranks[machine.set_first[s] : machine.set_first[s + 1]]
                if len(ranks) == 2 and wave.used[ranks[0]] == 0 and wave.used[ranks[1]] == 0:
                    _open_on(ranks, machine, wave)
        for rank in range(machine.num_ranks):
            if wave.used[rank] == 0:
                _open_on(np.array([rank]), machine, wave)
        wave.bucket[:] = -1
    for free in range(machine.per_node, 0, -1):
        while wave.bucket[free] >= 0:
            node_free = free
            while node_free:
                degree = 2 if pair and node_free >= 2 else 1
                _open_bin(degree, node_free, machine, wave)
                node_free -= degree
    tree = make_tree(wave.bins[0])
    for b in range(wave.bins[0]):
        _room(b, target, machine, tree, wave)
    for k in range(small):
        i = later[k]
        b = _bin_for(i, target, sequences, machine, tree, wave)
        if b == NO_BIN:
            left_over[rest] = i
            rest += 1
        else:
            _lay(i, b, sequences, machine, wave)
            _room(b, target, machine, tree, wave)
    return int(rest)


@kernel
def wave_seconds(machine: Machine, wave: Wave) -> float:
    """Seconds of the slowest group of the wave."""
    slowest = 0.0
    for b in range(wave.bins[0]):
        if wave.tokens[b]:
            slowest = max(
                slowest,
                pack_seconds(
                    wave.attention[b], wave.linear[b], wave.tokens[b], wave.degree[b], wave.crosses[b] > 0, machine
                ),
            )
    return slowest
