"""Shared by both searches: sequences and ranks as arrays, the price of a pack, a tree that finds the first with room.

The price repeats the formulas of `cost.model` and `planning.work`, which work on whole arrays, for one pack in an inner
loop: `ring_pack_seconds` for rings alone, `way_terms` where groups may split heads. A test holds those of rings alone
equal to the last bit, but for one thing: bytes are divided by the bandwidth once for all (`Machine.intra`,
`Machine.inter`) instead of in every evaluation, which may round the ring's seconds otherwise. Those of `way_terms` are
summed up before tokens are known, and round otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling import inlined, kernel, leaf

NONE = -1
_LONGEST = 1 << 62  # tokens of the shortest sequence of none
AT_BEST = -1  # `across` of a group of which nothing is known but that it lies across nodes


class Sequences(NamedTuple):
    """A global batch, by falling work unless stated otherwise. All arrays are [sequences], for a single rank each."""

    attention: FloatArray
    linear: FloatArray  # all that hides no ring
    work: FloatArray  # attention + linear
    tokens: IntArray


class Load(NamedTuple):
    """What a pack, or a sequence, takes on one rank.

    Attributes:
        attention, linear, tokens: as of `Sequences`, summed.
        halo: tokens that layers with windows look back at, summed; 0 where rings carry all layers.
        shortest: tokens of its shortest sequence.
    """

    attention: float
    linear: float
    tokens: int
    halo: int
    shortest: int


class Loads(NamedTuple):
    """What packs take, as arrays of the fields of `Load`."""

    attention: FloatArray
    linear: FloatArray
    tokens: IntArray
    halo: IntArray
    shortest: IntArray


class Splits(NamedTuple):
    """How groups may split heads. The first five arrays are [heads degrees that there may be].

    Attributes:
        heads: ranks of a set that shares the heads.
        copies: how many of them hold the same key/value head.
        inside, across: seconds in which a set exchanges one token of each, in a node and across nodes.
        messages: seconds of the exchanges beside their bytes.
        only: 1 where all ranks of a group are one set, which may then lie across nodes.
        lies: [ranks_per_node + 2] the row of `first` for `across` = AT_BEST, 0, 1, and so on; empty where groups are
            rings, whatever they cost.
        first: [rows, num_ranks + 2] where the ways to run a pack on each degree begin in `ways`.
        ways: [ways, 7] what `way_terms` returns of each; `ways.tabulated` leaves out those that never take least.
    """

    heads: IntArray
    copies: FloatArray
    inside: FloatArray
    across: FloatArray
    messages: FloatArray
    only: int
    lies: IntArray
    first: IntArray
    ways: FloatArray


class Machine(NamedTuple):
    """The ranks and what a micro-batch costs on them.

    Attributes:
        num_ranks, ranks_per_node: ranks r with equal r // ranks_per_node share a node; the last node may be smaller.
        tokens_per_rank: tokens that a rank may hold in one micro-batch.
        beta: seconds of a micro-batch beside its work.
        intra, inter: seconds in which the ring moves one token, inside a node and across nodes.
        hop: seconds of a ring hop beside its bytes.
        home_intra, home_inter: of `intra` and `inter`, seconds of a token in a ring's last hop, which nothing hides.
        home: seconds of that hop beside its bytes.
        exposed: share of a ring's seconds that no attention hides.
        chunk: seconds that attention takes longer in a ring, per token and hop.
        reach: tokens before its own that one looks back at in layers whose halos travel; 0: rings carry all layers.
        halo_intra, halo_inter: seconds in which a halo's token travels, inside a node and across nodes.
        halo_message: seconds of a message of a halo beside its bytes.
        floor: least seconds of a wave.
        padding: what a rank's share of a sequence is padded to a multiple of, in tokens; 0: of nothing.
        padding_seconds: of one token of padding, beside attention.
        group_first, group_degree: first rank and degree of each group that rings may use, widest first; none: all
            groups of neighbouring ranks.
        allowed: [num_ranks + 1] 1 for each degree that a group may have.
        whole_nodes: 1 if groups across nodes must be of whole nodes; only without a catalogue of groups.
        splits: how groups may split heads beside being rings; none: they are rings.
    """

    num_ranks: int
    ranks_per_node: int
    tokens_per_rank: int
    beta: float
    intra: float
    inter: float
    hop: float
    home_intra: float
    home_inter: float
    home: float
    exposed: float
    chunk: float
    reach: int
    halo_intra: float
    halo_inter: float
    halo_message: float
    floor: float
    padding: int
    padding_seconds: float
    group_first: IntArray
    group_degree: IntArray
    allowed: IntArray
    whole_nodes: int
    splits: Splits


class Tree(NamedTuple):
    """A heap-shaped tree of maxima over bins: free seconds, and free tokens. Leaf b is node len // 2 + b.

    It has a power of two of leaves, at least as many as bins; those beyond have no room, so that none is ever found.
    """

    seconds: FloatArray
    tokens: IntArray


@inlined
def ring_seconds(tokens: float, degree: int, across: int, machine: Machine) -> float:
    """Return the seconds of a ring of single ranks: `cost.model.ring_seconds`."""
    per_token = machine.inter if across else machine.intra
    return per_token * tokens * (degree - 1) / degree + machine.hop * (degree - 1) + machine.home


@inlined
def exposed_seconds(ring: float, tokens: float, degree: int, across: int, machine: Machine) -> float:
    """Return the seconds of a ring that nothing hides: a share, and the last hop (`cost.model.last_hop_seconds`)."""
    home = (machine.home_inter if across else machine.home_intra) * tokens / degree + machine.home
    return machine.exposed * (ring - home) + home


@inlined
def halo_messages(sets: float, shortest: int, machine: Machine) -> float:
    """Return how many messages a halo takes in a ring of so many sets: `cost.model.halo_messages`."""
    if sets == 1.0:
        return 0.0
    return float(min(2.0 * np.ceil(2.0 * sets * machine.reach / shortest), sets + 1.0))


@inlined
def sequence_load(i: int, sequences: Sequences, machine: Machine) -> Any:
    """Return what a sequence takes, as it is."""
    tokens = sequences.tokens[i]
    return Load(sequences.attention[i], sequences.linear[i], tokens, min(tokens, 2 * machine.reach), tokens)


@inlined
def padded_load(i: int, degree: int, sequences: Sequences, machine: Machine) -> Any:
    """Return what a sequence takes padded for this degree: `planning.work.work_on`.

    A group has whole multiples of `padding` x degree tokens left: what fits without more padding, fits with it.
    """
    if machine.padding == 0 or degree == 1:
        return sequence_load(i, sequences, machine)
    tokens, unit = sequences.tokens[i], machine.padding * degree
    padded = (tokens + unit - 1) // unit * unit
    growth = padded / tokens
    return Load(
        sequences.attention[i] * growth * growth,
        sequences.linear[i] + machine.padding_seconds * (padded - tokens),
        padded,
        min(padded, 2 * machine.reach),
        padded,
    )


@inlined
def together(load: Load, more: Load) -> Any:
    """Return what two packs take as one."""
    return Load(
        load.attention + more.attention,
        load.linear + more.linear,
        load.tokens + more.tokens,
        load.halo + more.halo,
        min(load.shortest, more.shortest),
    )


@kernel
def make_loads(count: int) -> Any:
    """Make so many empty packs."""
    return Loads(
        np.zeros(count),
        np.zeros(count),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.full(count, _LONGEST),
    )


@inlined
def load_at(pack: int, loads: Loads) -> Any:
    """Return what one of the packs takes."""
    return Load(loads.attention[pack], loads.linear[pack], loads.tokens[pack], loads.halo[pack], loads.shortest[pack])


@inlined
def enter_load(pack: int, load: Load, loads: Loads) -> None:
    """Write down what one of the packs takes."""
    loads.attention[pack], loads.linear[pack], loads.tokens[pack] = load.attention, load.linear, load.tokens
    loads.halo[pack], loads.shortest[pack] = load.halo, load.shortest


@inlined
def enter_empty(pack: int, loads: Loads) -> None:
    """Write down that there is nothing in one of the packs."""
    loads.attention[pack], loads.linear[pack], loads.tokens[pack] = 0.0, 0.0, 0
    loads.halo[pack], loads.shortest[pack] = 0, _LONGEST


@inlined
def pack_seconds(load: Load, degree: int, across: int, machine: Machine) -> float:
    """Return the predicted seconds of a pack, as ring or with the heads split: `cost.model.group_seconds`.

    Args:
        load: of the pack, on one rank.
        degree: ranks of the group.
        across: 0 inside a node; else a number that divides how many ranks it has on every node, AT_BEST any.
        machine: the ranks and their cost.
    """
    if degree == 1:
        return machine.beta + load.linear + load.attention
    if len(machine.splits.lies) == 0:
        return ring_pack_seconds(load, degree, across, machine)
    splits, best = machine.splits, np.inf
    row, tokens, attention = splits.lies[across + 1], load.tokens, load.attention / degree
    for way in range(splits.first[row, degree], splits.first[row, degree + 1]):
        computed = attention + splits.ways[way, 0] * tokens
        moved = splits.ways[way, 1] * tokens + splits.ways[way, 2]
        seconds = max(computed, moved) + (splits.ways[way, 3] * tokens + splits.ways[way, 4])
        if machine.reach:
            messages = halo_messages(splits.ways[way, 6], load.shortest, machine)
            seconds += splits.ways[way, 5] * load.halo + machine.halo_message * messages
        best = min(best, seconds)
    return machine.beta + load.linear / degree + best


@inlined
def ring_pack_seconds(load: Load, degree: int, across: int, machine: Machine) -> float:
    """Return the predicted seconds of a pack on a ring of more than one rank."""
    tokens = load.tokens
    ring = ring_seconds(tokens, degree, across, machine)
    exposed = exposed_seconds(ring, tokens, degree, across, machine)
    computed = load.attention / degree + machine.chunk * tokens * (degree - 1.0) / degree
    seconds = machine.beta + load.linear / degree + max(computed, ring - exposed) + exposed
    if machine.reach:
        per_token = (machine.halo_inter if across else machine.halo_intra) * (degree - 1.0) / degree
        messages = halo_messages(1.0 * degree, load.shortest, machine)
        seconds += per_token * load.halo + machine.halo_message * messages
    return seconds


@inlined
def way_terms(k: int, degree: int, across: int, machine: Machine) -> Any:
    """Return how a pack's seconds follow from its tokens where the k-th heads degree splits it, -1 for a ring.

    These are c, p, q, r, s and h of

        beta + linear / d + max(attention / d + c tokens, p tokens + q) + r tokens + s + h halo

    and how many sets there are in the ring, from which a halo's messages follow; all infinite where there are no such
    sets: they do not fill the group, or lie across nodes and are not all of it.
    """
    splits = machine.splits
    heads, copies, exchange, messages = 1, 1.0, 0.0, 0.0
    if k >= 0:
        heads, copies, messages = splits.heads[k], splits.copies[k], splits.messages[k]
        spans = heads > machine.ranks_per_node or (across > 0 and across % heads != 0)
        exchange = splits.across[k] if spans else splits.inside[k]
        if across == AT_BEST and splits.only and not spans:
            exchange = min(splits.across[k], splits.inside[k])
        if degree % heads != 0 or (degree != heads if splits.only else spans):
            return np.inf, np.inf, np.inf, np.inf, np.inf, np.inf, np.inf
    hops = degree // heads - 1
    if hops == 0:
        return 0.0, 0.0, 0.0, exchange / degree, messages, 0.0, 1.0
    home = (machine.home_inter if across else machine.home_intra) * copies
    hidden = (machine.inter if across else machine.intra) * copies * hops - home  # but for the share that is exposed
    return (
        machine.chunk * hops / degree,
        (1.0 - machine.exposed) * hidden / degree,
        (1.0 - machine.exposed) * machine.hop * hops,
        (machine.exposed * hidden + home + exchange) / degree,
        machine.exposed * machine.hop * hops + machine.home + messages,
        (machine.halo_inter if across else machine.halo_intra) * copies * hops / degree,
        hops + 1.0,
    )


@inlined
def way_seconds(k: int, load: Load, degree: int, across: int, machine: Machine) -> float:
    """Return the predicted seconds of a pack on more than one rank that goes the way of `way_terms`."""
    chunks, bytes_hidden, hops_hidden, bytes_beside, beside, halo, sets = way_terms(k, degree, across, machine)
    if beside == np.inf:
        return np.inf
    busy = max(load.attention / degree + chunks * load.tokens, bytes_hidden * load.tokens + hops_hidden)
    if machine.reach:
        beside += halo * load.halo + machine.halo_message * halo_messages(sets, load.shortest, machine)
    return float(machine.beta + load.linear / degree + busy + bytes_beside * load.tokens + beside)


@inlined
def alone_seconds(i: int, degree: int, across: int, sequences: Sequences, machine: Machine) -> float:
    """Return the predicted seconds of one sequence alone on a group, with its padding."""
    return pack_seconds(padded_load(i, degree, sequences, machine), degree, across, machine)


@inlined
def common_divisor(one: int, other: int) -> int:
    """Return the greatest number that divides both."""
    while other:
        one, other = other, one % other
    return one


@inlined
def across_at_best(degree: int, machine: Machine) -> int:
    """Return `across` of a group on whole nodes and a rest of one more."""
    return common_divisor(degree, machine.ranks_per_node) if degree > machine.ranks_per_node else 0


@inlined
def across_of(first: int, degree: int, machine: Machine) -> int:
    """Return `across` of the group of `degree` neighbouring ranks from `first` on."""
    per_node = machine.ranks_per_node
    head = min(per_node - first % per_node, degree)
    if head == degree:
        return 0
    tail = (first + degree) % per_node
    together = common_divisor(head, tail)
    return common_divisor(per_node, together) if head + tail < degree else together


@leaf
def total_of(values: FloatArray | IntArray) -> Any:
    """Add values one by one: numpy's own sum takes another order than numba's, and many times longer to compile."""
    total = 0
    for value in values:
        total += value
    return total


@leaf
def most_of(values: FloatArray | IntArray) -> Any:
    """Return the largest of values that are not negative; 0 of none."""
    most = 0
    for value in values:
        most = max(most, value)
    return most


@kernel
def falling_order(values: FloatArray | IntArray) -> IntArray:
    """Return the positions of values, the largest first, ties by position: merges runs that double in length."""
    n, width = len(values), 1
    order, merged = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    for k in range(n):
        order[k] = k
    while width < n:
        for low in range(0, n, 2 * width):
            middle, high = min(low + width, n), min(low + 2 * width, n)
            one, other = low, middle
            for k in range(low, high):
                if one < middle and (other == high or values[order[one]] >= values[order[other]]):
                    merged[k] = order[one]
                    one += 1
                else:
                    merged[k] = order[other]
                    other += 1
        order, merged = merged, order
        width *= 2
    return order


@kernel
def make_tree(bins: int) -> Any:
    """Make a tree whose bins all have no room."""
    size = 1
    while size < bins:
        size *= 2
    return Tree(np.full(2 * size, -np.inf), np.full(2 * size, -1, dtype=np.int64))


@leaf
def set_room(tree: Tree, leaf: int, seconds: float, tokens: int) -> None:
    """Enter what a bin has left."""
    node = (len(tree.seconds) >> 1) + leaf
    tree.seconds[node] = seconds
    tree.tokens[node] = tokens
    node >>= 1
    while node >= 1:
        left = 2 * node
        most_seconds = max(tree.seconds[left], tree.seconds[left + 1])
        most_tokens = max(tree.tokens[left], tree.tokens[left + 1])
        if tree.seconds[node] == most_seconds and tree.tokens[node] == most_tokens:
            break  # nothing changes above, either
        tree.seconds[node] = most_seconds
        tree.tokens[node] = most_tokens
        node >>= 1


@leaf
def first_with_room(tree: Tree, seconds: float, tokens: int, start: int) -> int:
    """Return the first bin from `start` on that has both the seconds and the tokens, or NONE."""
    size = len(tree.seconds) >> 1
    if start >= size or tree.seconds[1] < seconds or tree.tokens[1] < tokens:
        return NONE
    node = size + start if start else 1
    # A node may have the seconds in one bin and the tokens in another: then the walk goes on behind it.
    while True:
        if tree.seconds[node] >= seconds and tree.tokens[node] >= tokens:
            if node >= size:
                return node - size
            node = 2 * node
            continue
        while node & 1:  # the last of its parent: everything below that has been seen
            node >>= 1
        if node == 0:
            return NONE
        node += 1


@leaf
def roomiest(tree: Tree) -> int:
    """Return the first bin with the most seconds left."""
    size = len(tree.seconds) >> 1
    node = 1
    while node < size:
        node = 2 * node if tree.seconds[2 * node] >= tree.seconds[2 * node + 1] else 2 * node + 1
    return node - size
