"""Shared by both searches: sequences and ranks as arrays, the price of a pack, a tree that finds the first with room.

The price is `cost.formula`, compiled here for the floats of one pack: numba compiles functions that call nothing of
their own file. The terms of all groups that there may be are tabulated once for the ranks (`ways`), since the searches
price the same few hundred kinds of groups millions of times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.cost import formula
from fcp_cli.cost.formula import GroupTerms, UnitPrices

NONE = -1
_LONGEST = 1 << 62  # tokens of the shortest sequence of none
UNPLACED = -1  # `across` of a group of which nothing is known but that it lies across nodes

# Each by itself: a formula that called another one of its file would call a plain function, which numba cannot.
group_terms = inlined(formula.group_terms)
pack_parts = inlined(formula.pack_parts)
overlapped_seconds = inlined(formula.overlapped_seconds)
recomputation_seconds = inlined(formula.recomputation_seconds)
halo_messages = inlined(formula.halo_messages)
halo_seconds = inlined(formula.halo_seconds)


class Sequences(NamedTuple):
    """A global batch, by falling work unless stated otherwise. All arrays are [sequences], for a single rank each."""

    attention: FloatArray
    linear: FloatArray  # all that hides no ring
    work: FloatArray  # attention + linear
    tokens: IntArray


class Load(NamedTuple):
    """Load of a pack, or a sequence, on one rank.

    Attributes:
        attention, linear, tokens: the sums of the values of `Sequences`.
        halo: tokens that layers with windows look back at, summed; 0 if rings carry all layers.
        shortest: tokens of its shortest sequence.
    """

    attention: float
    linear: float
    tokens: int
    halo: int
    shortest: int


class Loads(NamedTuple):
    """Loads of packs, as arrays of the fields of `Load`."""

    attention: FloatArray
    linear: FloatArray
    tokens: IntArray
    halo: IntArray
    shortest: IntArray


class Splits(NamedTuple):
    """The ways in which groups may share heads and make rings.

    Attributes:
        heads: [heads degrees that there may be] ranks of a set that shares the heads; empty if groups are rings.
        only: 1 if all ranks of a group are one set, which may then lie across nodes.
        row_of_span: [ranks_per_node + 2] the row of `first` for `across` = UNPLACED, 0, 1, and so on.
        first: [rows, num_ranks + 2] start in `ways` of the ways to run a pack on each degree.
        ways: [ways, 9] the `GroupTerms` of each; `ways.tabulated` skips those that are never the quickest.
    """

    heads: IntArray
    only: int
    row_of_span: IntArray
    first: IntArray
    ways: FloatArray


class PlannerInputs(NamedTuple):
    """The ranks and their prices.

    Attributes:
        num_ranks, ranks_per_node: ranks r with equal r // ranks_per_node share a node; the last node may be smaller.
        tokens_per_rank: tokens that a rank may hold in one micro-batch.
        shared_tokens: how many tokens sequences which share a single rank's micro-batch may hold together: more would
            cost more recomputation than another micro-batch.
        prices: the prices of the profile.
        floor: least seconds of a wave.
        fill: share of the token budget that waves to come are expected to hold, by which a wave is rated; 0: all of it
            in each wave but the last.
        padding: a rank's share of a sequence is padded to a multiple of so many tokens; 0: no padding.
        padding_seconds: the seconds of one token of padding, without attention.
        group_first, group_degree: first rank and degree of each group that rings may use, widest first; none: all
            groups of neighbouring ranks.
        allowed: [num_ranks + 1] 1 for each degree that a group may have.
        whole_nodes: 1 if groups across nodes must be of whole nodes; only without a catalogue of groups.
        splits: how groups may share heads and make rings.
    """

    num_ranks: int
    ranks_per_node: int
    tokens_per_rank: int
    shared_tokens: int
    prices: UnitPrices
    floor: float
    fill: float
    padding: int
    padding_seconds: float
    group_first: IntArray
    group_degree: IntArray
    allowed: IntArray
    whole_nodes: int
    splits: Splits


@inlined
def sequence_load(i: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the load of a sequence without further padding."""
    # Each of a rank's two chunks looks back at `reach` tokens; a sequence gets no more rows than it has tokens.
    tokens = sequences.tokens[i]
    return Load(sequences.attention[i], sequences.linear[i], tokens, min(tokens, 2 * inputs.prices.reach), tokens)


@inlined
def padded_load(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the load of a sequence padded for this degree: `planning.work.work_on`.

    A group has whole multiples of `padding` x degree tokens left: sequences that fit without more padding fit with it.
    """
    # One rank runs its sequence unpadded: only rings pad, so that all members get equal chunks.
    if inputs.padding == 0 or degree == 1:
        return sequence_load(i, sequences, inputs)
    tokens, unit = sequences.tokens[i], inputs.padding * degree
    padded = (tokens + unit - 1) // unit * unit
    growth = padded / tokens
    return Load(
        # Attention grows with the square, as if the padding were tokens; the kernels do run them.
        sequences.attention[i] * growth * growth,
        sequences.linear[i] + inputs.padding_seconds * (padded - tokens),
        padded,
        min(padded, 2 * inputs.prices.reach),
        padded,
    )


@inlined
def together(load: Load, more: Load) -> Any:
    """Return the load of two packs as one."""
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
    """Return the load of one of the packs."""
    return Load(loads.attention[pack], loads.linear[pack], loads.tokens[pack], loads.halo[pack], loads.shortest[pack])


@inlined
def enter_load(pack: int, load: Load, loads: Loads) -> None:
    """Write the load of one of the packs."""
    loads.attention[pack], loads.linear[pack], loads.tokens[pack] = load.attention, load.linear, load.tokens
    loads.halo[pack], loads.shortest[pack] = load.halo, load.shortest


@inlined
def enter_empty(pack: int, loads: Loads) -> None:
    """Empty one of the packs."""
    loads.attention[pack], loads.linear[pack], loads.tokens[pack] = 0.0, 0.0, 0
    loads.halo[pack], loads.shortest[pack] = 0, _LONGEST


@inlined
def terms_at(way: int, ways: FloatArray) -> Any:
    """Return the terms of one of the tabulated ways."""
    # Field by field: numba unpacks tuples only, whose length it knows when it compiles.
    return GroupTerms(
        ways[way, 0],
        ways[way, 1],
        ways[way, 2],
        ways[way, 3],
        ways[way, 4],
        ways[way, 5],
        ways[way, 6],
        ways[way, 7],
        ways[way, 8],
    )


@inlined
def pack_seconds(load: Load, degree: int, across: int, inputs: PlannerInputs) -> float:
    """Return the predicted seconds of a pack, the quickest way: `cost.model.group_seconds`.

    Args:
        load: the load of the pack, on one rank.
        degree: ranks of the group.
        across: 0 inside a node; else a number that divides how many ranks it has on every node, UNPLACED any.
        inputs: the ranks and their cost.
    """
    if degree == 1:  # the commonest by far, and the same sum
        again = recomputation_seconds(load.tokens, 1, inputs.prices)
        return float(inputs.prices.beta + load.linear + load.attention + again)
    # Stays infinite if no way fits, as under `ulysses` where so many ranks cannot share the heads.
    splits, best = inputs.splits, np.inf
    row = splits.row_of_span[across + 1]  # `across` begins at UNPLACED, -1
    for way in range(splits.first[row, degree], splits.first[row, degree + 1]):
        best = min(best, seconds_by(terms_at(way, splits.ways), load, degree, inputs))
    return best


@inlined
def recomputation_slope(held: float, prices: Any) -> float:
    """Return the seconds that one more token of a rank that holds so many takes to recompute, at least."""
    # Lines rise in slope (`recompute_levels.check_levels`): the last one on the maximum is its tangent, and at a kink
    # the steeper one, which the next token pays. Convex, so no later token takes less.
    most, slope = 0.0, 0.0
    for line in range(len(prices.again)):
        seconds = prices.again[line, 0] * held - prices.again[line, 1]
        if seconds >= most and prices.again[line, 0] > slope:
            most, slope = seconds, prices.again[line, 0]
    return slope


@inlined
def seconds_by(terms: Any, load: Load, degree: int, inputs: PlannerInputs) -> float:
    """Return the predicted seconds of a pack on a group of these terms."""
    prices = inputs.prices
    seconds = overlapped_seconds(pack_parts(load.attention, load.linear, load.tokens, degree, terms, prices))
    seconds += recomputation_seconds(load.tokens, degree, prices)
    if prices.reach:
        messages = halo_messages(terms.sets, load.shortest, prices.reach)
        seconds += halo_seconds(load.halo, messages, terms, prices)
    return float(seconds)


@inlined
def is_way(k: int, degree: int, across: int, inputs: PlannerInputs) -> bool:
    """Return whether groups may be sets of the k-th heads degree, -1 for rings of single ranks.

    Sets fill the group, and lie inside nodes unless they are all of it.
    """
    if k < 0:
        return not inputs.splits.only
    heads = inputs.splits.heads[k]
    if inputs.splits.only:
        return bool(degree == heads)
    return bool(degree % heads == 0 and not _spans(heads, across, inputs))


@inlined
def _spans(heads: int, across: int, inputs: PlannerInputs) -> bool:
    """Return whether sets of so many ranks lie across nodes."""
    # Sets are neighbouring ranks: they straddle no node if their size divides the ranks that the group has on each.
    return bool(heads > inputs.ranks_per_node or (across > 0 and across % heads != 0))


@inlined
def way_terms(k: int, degree: int, across: int, inputs: PlannerInputs) -> Any:
    """Return the terms of groups of sets of the k-th heads degree, -1 for rings of single ranks; see `is_way`."""
    # A ring of single ranks is a ring of sets of one.
    heads = inputs.splits.heads[k] if k >= 0 else 1
    spans = 1 if _spans(heads, across, inputs) else 0
    # Unplaced groups count as placed at best: a bound may not be too high.
    if across == UNPLACED and inputs.splits.only and not spans:
        spans = faster_tier(inputs)
    return group_terms(degree, heads, 1 if across else 0, spans, inputs.prices)


@inlined
def faster_tier(inputs: PlannerInputs) -> int:
    """Return 1 if bytes travel faster across nodes than inside one, else 0."""
    # Sums, since some of them may be 0: each is bytes over the same two bandwidths, so all order the tiers alike.
    prices = inputs.prices
    across = prices.ring[1] + prices.exchange[1] + prices.key_value_exchange[1]
    return 1 if across < prices.ring[0] + prices.exchange[0] + prices.key_value_exchange[0] else 0


@inlined
def alone_seconds(i: int, degree: int, across: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the predicted seconds of a single sequence on a group, with its padding."""
    return pack_seconds(padded_load(i, degree, sequences, inputs), degree, across, inputs)


@inlined
def common_divisor(one: int, other: int) -> int:
    """Return the greatest number that divides both."""
    while other:
        one, other = other, one % other
    return one


@inlined
def across_at_best(degree: int, inputs: PlannerInputs) -> int:
    """Return `across` of a group on whole nodes and a rest of one more."""
    # The rest is `degree` less whole nodes, so its divisor with a node is the degree's (Euclid).
    return common_divisor(degree, inputs.ranks_per_node) if degree > inputs.ranks_per_node else 0


@inlined
def across_of(first: int, degree: int, inputs: PlannerInputs) -> int:
    """Return `across` of the group of `degree` neighbouring ranks from `first` on."""
    per_node = inputs.ranks_per_node
    # Ranks on the first node; whole nodes follow, and a rest on the last.
    head = min(per_node - first % per_node, degree)
    if head == degree:
        return 0
    # A tail of 0 is no rest: the divisor of 0 and the head is the head.
    tail = (first + degree) % per_node
    together = common_divisor(head, tail)
    # Whole nodes in between, or not.
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
    # Not numba's argsort, which takes 1.4 s to compile where this takes 0.2.
    n, width = len(values), 1
    # Stable: equal sequences keep their order, on every machine.
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
