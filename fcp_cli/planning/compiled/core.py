"""Basics of all kernels: sequences and ranks as arrays, and the price of a pack.

The price is `cost.formula`, compiled here for the floats of a single pack, which numba can do since its functions call
none of their own module. The terms of all possible groups are tabulated once (`ways`), since the searches price the
same few hundred kinds of groups millions of times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.cost import formula
from fcp_cli.cost.formula import GroupTerms, UnitPrices

NONE = -1
_LONGEST = 1 << 62  # tokens of the shortest sequence of an empty pack: the identity of `min`
UNPLACED = -1  # `across` of a group that crosses nodes at unknown places

# Compiled one by one: a formula must not call another one of its module, since numba cannot call plain functions.
group_terms = inlined(formula.group_terms)
pack_parts = inlined(formula.pack_parts)
overlapped_seconds = inlined(formula.overlapped_seconds)
recomputation_seconds = inlined(formula.recomputation_seconds)
halo_messages = inlined(formula.halo_messages)
halo_seconds = inlined(formula.halo_seconds)


class Sequences(NamedTuple):
    """A global batch, by falling work unless stated otherwise. All arrays are [sequences], priced on a single rank."""

    attention: FloatArray
    linear: FloatArray  # all seconds that hide no ring traffic
    work: FloatArray  # attention + linear
    tokens: IntArray


class Load(NamedTuple):
    """Load of a pack or a sequence, priced on one rank.

    Attributes:
        attention, linear, tokens: sums of the fields of `Sequences`.
        halo: halo tokens of sliding-window layers, summed; 0 if rings carry all layers.
        shortest: tokens of the shortest sequence.
    """

    attention: float
    linear: float
    tokens: int
    halo: int
    shortest: int


class Loads(NamedTuple):
    """Loads of packs: one array per field of `Load`."""

    attention: FloatArray
    linear: FloatArray
    tokens: IntArray
    halo: IntArray
    shortest: IntArray


class Splits(NamedTuple):
    """The ways to run a group: as a ring, a Ulysses set, or a ring of Ulysses sets.

    Attributes:
        heads: [heads degrees] allowed Ulysses degrees; empty if all groups are rings.
        only: 1 if every group is a single Ulysses set, which may then cross nodes.
        row_of_span: [ranks_per_node + 2] row of `first` for `across` = UNPLACED, 0, 1, ...
        first: [rows, num_ranks + 2] position in `ways` of the first way of each degree.
        ways: [ways, 9] the `GroupTerms` of each way; `ways.tabulated` drops those that are never the fastest.
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
        tokens_per_rank: token budget of a rank in one micro-batch.
        shared_tokens: maximum tokens of several sequences in one single-rank micro-batch; beyond it, recomputation
            costs more than a further micro-batch.
        prices: unit prices of the profile.
        floor: least seconds of a wave.
        fill: expected fill of later waves, as a share of the token budget, by which a wave is rated; 0: all but the
            last are full.
        padding: multiple to which a rank's share of a sequence is padded, in tokens; 0: no padding.
        padding_seconds: seconds of a padding token, without attention.
        group_first, group_degree: first rank and degree of each group that rings may use, widest first; empty: all
            groups of neighbouring ranks.
        allowed: [num_ranks + 1] 1 for each degree that a group may have, else 0.
        whole_nodes: 1 if groups across nodes must consist of whole nodes; only without a catalogue of groups.
        splits: the ways to run a group.
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
    """Return the load of a sequence, without the padding of wider groups."""
    # Each of a rank's two chunks needs a halo of `reach` tokens, and no sequence has more halo than tokens.
    tokens = sequences.tokens[i]
    return Load(sequences.attention[i], sequences.linear[i], tokens, min(tokens, 2 * inputs.prices.reach), tokens)


@inlined
def padded_load(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the load of a sequence padded for this degree; the same as `planning.work.work_on`.

    The free tokens of a group are always a multiple of `padding` x degree, so padding never makes a sequence too long.
    """
    # Only rings pad, so that all members get equal chunks.
    if inputs.padding == 0 or degree == 1:
        return sequence_load(i, sequences, inputs)
    tokens, unit = sequences.tokens[i], inputs.padding * degree
    padded = (tokens + unit - 1) // unit * unit
    growth = padded / tokens
    return Load(
        # Quadratic in the padded length, since attention kernels do process the padding.
        sequences.attention[i] * growth * growth,
        sequences.linear[i] + inputs.padding_seconds * (padded - tokens),
        padded,
        min(padded, 2 * inputs.prices.reach),
        padded,
    )


@inlined
def together(load: Load, more: Load) -> Any:
    """Return the sum of two loads."""
    return Load(
        load.attention + more.attention,
        load.linear + more.linear,
        load.tokens + more.tokens,
        load.halo + more.halo,
        min(load.shortest, more.shortest),
    )


@kernel
def make_loads(count: int) -> Any:
    """Make `count` empty loads."""
    return Loads(
        np.zeros(count),
        np.zeros(count),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        np.full(count, _LONGEST),
    )


@inlined
def load_at(pack: int, loads: Loads) -> Any:
    """Return the load of a pack."""
    return Load(loads.attention[pack], loads.linear[pack], loads.tokens[pack], loads.halo[pack], loads.shortest[pack])


@inlined
def enter_load(pack: int, load: Load, loads: Loads) -> None:
    """Set the load of a pack."""
    loads.attention[pack], loads.linear[pack], loads.tokens[pack] = load.attention, load.linear, load.tokens
    loads.halo[pack], loads.shortest[pack] = load.halo, load.shortest


@inlined
def enter_empty(pack: int, loads: Loads) -> None:
    """Reset a pack to the empty load."""
    loads.attention[pack], loads.linear[pack], loads.tokens[pack] = 0.0, 0.0, 0
    loads.halo[pack], loads.shortest[pack] = 0, _LONGEST


@inlined
def terms_at(way: int, ways: FloatArray) -> Any:
    """Return the terms of a tabulated way."""
    # Field by field: numba cannot unpack an array, whose length is unknown at compile time.
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
    """Return the predicted seconds of a pack by its fastest way; the same as `cost.model.group_seconds`.

    Args:
        load: load of the pack, padded for the degree.
        degree: ranks of the group.
        across: 0 inside a node; else the greatest common divisor of the group's ranks on each node, or UNPLACED.
        inputs: the ranks and their prices.
    """
    if degree == 1:  # shortcut for by far the most frequent case
        again = recomputation_seconds(load.tokens, 1, inputs.prices)
        return float(inputs.prices.beta + load.linear + load.attention + again)
    # Stays infinite if no way exists, e.g. under `ulysses` if the heads cannot be split by this degree.
    splits, best = inputs.splits, np.inf
    row = splits.row_of_span[across + 1]  # `across` begins at UNPLACED, -1
    for way in range(splits.first[row, degree], splits.first[row, degree + 1]):
        best = min(best, seconds_by(terms_at(way, splits.ways), load, degree, inputs))
    return best


@inlined
def recomputation_slope(held: float, prices: Any) -> float:
    """Return the least seconds that one more token adds to the recomputation of a rank that holds `held` tokens."""
    # Recomputation is the maximum of lines of rising slope (`recompute_levels.check_levels`). The last line at the
    # maximum is the tangent, at a kink the steeper one, which the next token pays. Convex: later ones pay no less.
    most, slope = 0.0, 0.0
    for line in range(len(prices.again)):
        seconds = prices.again[line, 0] * held - prices.again[line, 1]
        if seconds >= most and prices.again[line, 0] > slope:
            most, slope = seconds, prices.again[line, 0]
    return slope


@inlined
def seconds_by(terms: Any, load: Load, degree: int, inputs: PlannerInputs) -> float:
    """Return the predicted seconds of a pack run with these terms."""
    prices = inputs.prices
    seconds = overlapped_seconds(pack_parts(load.attention, load.linear, load.tokens, degree, terms, prices))
    seconds += recomputation_seconds(load.tokens, degree, prices)
    if prices.reach:
        messages = halo_messages(terms.sets, load.shortest, prices.reach)
        seconds += halo_seconds(load.halo, messages, terms, prices)
    return float(seconds)


@inlined
def is_way(k: int, degree: int, across: int, inputs: PlannerInputs) -> bool:
    """Return whether a group can run with the k-th Ulysses degree (-1: as a ring of single ranks).

    Sets must divide the group evenly, and lie inside nodes unless a single set is the whole group.
    """
    if k < 0:
        return not inputs.splits.only
    heads = inputs.splits.heads[k]
    if inputs.splits.only:
        return bool(degree == heads)
    return bool(degree % heads == 0 and not _spans(heads, across, inputs))


@inlined
def _spans(heads: int, across: int, inputs: PlannerInputs) -> bool:
    """Return whether Ulysses sets of `heads` ranks cross nodes."""
    # Sets are neighbouring ranks: they cross no node if their size divides the group's number of ranks on each node.
    return bool(heads > inputs.ranks_per_node or (across > 0 and across % heads != 0))


@inlined
def way_terms(k: int, degree: int, across: int, inputs: PlannerInputs) -> Any:
    """Return the terms of a group with the k-th Ulysses degree (-1: a ring of single ranks); see `is_way`."""
    # A ring of single ranks is a ring of sets of size 1.
    heads = inputs.splits.heads[k] if k >= 0 else 1
    spans = 1 if _spans(heads, across, inputs) else 0
    # Unplaced groups are only priced by lower bounds, so assume the faster tier.
    if across == UNPLACED and inputs.splits.only and not spans:
        spans = faster_tier(inputs)
    return group_terms(degree, heads, 1 if across else 0, spans, inputs.prices)


@inlined
def faster_tier(inputs: PlannerInputs) -> int:
    """Return 1 if bytes travel faster across nodes than inside one, else 0."""
    # All three are bytes over the same two bandwidths, so they order the tiers equally; summed, since some may be 0.
    prices = inputs.prices
    across = prices.ring[1] + prices.exchange[1] + prices.key_value_exchange[1]
    return 1 if across < prices.ring[0] + prices.exchange[0] + prices.key_value_exchange[0] else 0


@inlined
def alone_seconds(i: int, degree: int, across: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the predicted seconds of a single sequence on a group, with the group's padding."""
    return pack_seconds(padded_load(i, degree, sequences, inputs), degree, across, inputs)


@inlined
def common_divisor(one: int, other: int) -> int:
    """Return the greatest common divisor."""
    while other:
        one, other = other, one % other
    return one


@inlined
def across_at_best(degree: int, inputs: PlannerInputs) -> int:
    """Return `across` of a group on whole nodes and part of one more."""
    # That part is `degree` modulo a node, so its divisor with the node is that of the degree (Euclid).
    return common_divisor(degree, inputs.ranks_per_node) if degree > inputs.ranks_per_node else 0


@inlined
def across_of(first: int, degree: int, inputs: PlannerInputs) -> int:
    """Return `across` (see `pack_seconds`) of the group of ranks `first` to `first + degree - 1`."""
    per_node = inputs.ranks_per_node
    # `head` ranks on the first node, then whole nodes, then `tail` ranks on the last.
    head = min(per_node - first % per_node, degree)
    if head == degree:
        return 0
    # A tail of 0 needs no special case: gcd(head, 0) is the head.
    tail = (first + degree) % per_node
    together = common_divisor(head, tail)
    # The nodes between count only if there are any.
    return common_divisor(per_node, together) if head + tail < degree else together


@leaf
def total_of(values: FloatArray | IntArray) -> Any:
    """Return the sum, added in order: `np.sum` adds in another order under numba, and takes far longer to compile."""
    total = 0
    for value in values:
        total += value
    return total


@leaf
def most_of(values: FloatArray | IntArray) -> Any:
    """Return the largest of non-negative values; 0 for an empty array."""
    most = 0
    for value in values:
        most = max(most, value)
    return most


@kernel
def falling_order(values: FloatArray | IntArray) -> IntArray:
    """Return the positions of the values in falling order, ties by position (bottom-up merge sort)."""
    # Instead of numba's argsort: it compiles in 0.2 s, not 1.4 s.
    n, width = len(values), 1
    # Stable, so that equal sequences have the same order on every machine.
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
