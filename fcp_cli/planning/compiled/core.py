"""Basics of all searches: sequences, ranks and loads as arrays, and the price of a pack.

The price is `cost.formula`, compiled here for the floats of a single pack, which numba can do since its functions call
none of their own module. The terms of all ways to run a group (as a ring, a Ulysses set, or a ring of Ulysses sets) are
tabulated once per degree (`tabulated`), since the searches price the same few hundred kinds of groups millions of
times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.cost import formula
from fcp_cli.cost.formula import GroupTerms, UnitPrices
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf

NONE = -1
_LONGEST = 1 << 62  # tokens of the shortest sequence of an empty pack: the identity of `min`
TERMS = len(GroupTerms._fields)
UNPLACED = -1  # `across` of a group that crosses nodes at unknown places

# Compiled one by one: a formula must not call another one of its module, since numba cannot call plain functions.
group_terms = inlined(formula.group_terms)
pack_parts = inlined(formula.pack_parts)
overlapped_seconds = inlined(formula.overlapped_seconds)
recomputation_seconds = inlined(formula.recomputation_seconds)
halo_messages = inlined(formula.halo_messages)
halo_seconds = inlined(formula.halo_seconds)
host_seconds = inlined(formula.host_seconds)


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
        ways: [ways, terms] the `GroupTerms` of each way; `tabulated` drops those that are never the fastest.
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
        floor: least seconds of a wave, of the profile or of its hosts.
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
def least_degree(i: int, sequences: Sequences, inputs: PlannerInputs) -> int:
    """Return the least degree whose ranks together hold the tokens of sequence i."""
    return int((sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)


@inlined
def padded_load(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the load of a sequence padded for this degree; the same as `planning.problem.work_on`.

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
        return max(inputs.prices.host, float(inputs.prices.beta + load.linear + load.attention + again))
    # Stays infinite if no way exists, e.g. under `ulysses` if the heads cannot be split by this degree.
    splits, best = inputs.splits, np.inf
    row = splits.row_of_span[across + 1]  # `across` begins at UNPLACED, -1
    for way in range(splits.first[row, degree], splits.first[row, degree + 1]):
        terms = terms_at(way, splits.ways)
        best = min(best, max(seconds_by(terms, load, degree, inputs), _issued(terms, load, inputs)))
    return best


@inlined
def seconds_by(terms: Any, load: Load, degree: int, inputs: PlannerInputs) -> float:
    """Return the device's seconds of a pack run with these terms."""
    prices = inputs.prices
    seconds = overlapped_seconds(pack_parts(load.attention, load.linear, load.tokens, degree, terms, prices))
    seconds += recomputation_seconds(load.tokens, degree, prices)
    if prices.reach:
        messages = halo_messages(terms.sets, load.shortest, prices.reach)
        seconds += halo_seconds(load.halo, messages, terms, prices)
    return float(seconds)


@inlined
def _issued(terms: Any, load: Load, inputs: PlannerInputs) -> float:
    """Return the host's seconds of a pack run with these terms."""
    reach = inputs.prices.reach
    messages = halo_messages(terms.sets, load.shortest, reach) if reach else 0.0
    return float(host_seconds(messages, terms, inputs.prices))


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
        ways[way, 9],
    )


@inlined
def alone_seconds(i: int, degree: int, across: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the predicted seconds of a single sequence on a group, with the group's padding."""
    return pack_seconds(padded_load(i, degree, sequences, inputs), degree, across, inputs)


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


@kernel
def tabulated(inputs: PlannerInputs) -> Any:
    """Return the splits with their tables, `row_of_span`, `first` and `ways`.

    Apart from fixed and linear seconds, a pack of t tokens with a seconds of attention takes max(a / d + A(t), B(t)); A
    and B are linear in t (`_ends`). If neither A nor B of a way is smaller than those of another way at 0 tokens and at
    the group's capacity, nor its host's seconds, the way is never faster and is dropped. The exception is a way with
    fewer bytes or messages of halos, which grow with the number of sets.
    """
    splits = inputs.splits
    row_of_span, acrosses = _rows_of_spans(inputs)
    # One extra column, so that `first` also holds the end of the last degree's ways.
    first = np.zeros((len(acrosses), inputs.num_ranks + 2), dtype=np.int64)
    # Enough for one way per degree (rings of single ranks); grown if there are Ulysses sets.
    ways, count = np.zeros((len(acrosses) * (inputs.num_ranks + 2), TERMS)), 0
    for row in range(len(acrosses)):
        # From 2 on: callers price single ranks without the table.
        for degree in range(2, inputs.num_ranks + 1):
            first[row, degree] = count
            if count + len(splits.heads) + 1 > len(ways):  # `_enter` needs one scratch row
                # Doubled, since numba has no growable array of rows.
                grown = np.zeros((2 * len(ways) + len(splits.heads) + 1, TERMS))
                for way in range(count):
                    for term in range(TERMS):  # numba's assignment of slices takes 2 s to compile
                        grown[way, term] = ways[way, term]
                ways = grown
            count = _enter(degree, acrosses[row], count, ways, inputs)
        first[row, inputs.num_ranks + 1] = count
    # Copied, since a slice would keep the whole doubled array alive.
    return Splits(splits.heads, splits.only, row_of_span, first, ways[:count].copy())


@kernel
def _rows_of_spans(inputs: PlannerInputs) -> Any:
    """Return [ranks_per_node + 2] the row of each `across` (from UNPLACED on), and [rows] one `across` of each row.

    Values of `across` that allow the same Ulysses sets share a row.
    """
    heads = inputs.splits.heads
    rows, row_of_span = 0, np.zeros(inputs.ranks_per_node + 2, dtype=np.int64)
    acrosses = np.zeros(inputs.ranks_per_node + 2, dtype=np.int64)
    # UNPLACED and 0 get separate rows, since `way_terms` prices them by other rules.
    for across in range(UNPLACED, inputs.ranks_per_node + 1):
        row = 0
        while row < rows:
            # Prices only depend on the Ulysses degrees that divide `across`.
            alike = acrosses[row] > 0 and across > 0
            for k in range(len(heads)):
                alike = alike and (across % heads[k] == 0) == (acrosses[row] % heads[k] == 0)
            if alike:
                break
            row += 1
        if row == rows:
            acrosses[row], rows = across, rows + 1
        row_of_span[across + 1] = row
    return row_of_span, acrosses[:rows]


@leaf
def _enter(degree: int, across: int, first: int, ways: FloatArray, inputs: PlannerInputs) -> int:
    """Write the ways of one degree from row `first` on, ties to the lowest Ulysses degree; return the end row."""
    count, most = first, degree * inputs.tokens_per_rank
    for k in range(-1, len(inputs.splits.heads)):
        if not is_way(k, degree, across, inputs):
            continue
        terms = way_terms(k, degree, across, inputs)
        # The row after the last is scratch, written before it is known whether the way stays.
        ways[count, 0], ways[count, 1], ways[count, 2] = terms.chunk, terms.ring, terms.hops
        ways[count, 3], ways[count, 4], ways[count, 5] = terms.home, terms.home_hop, terms.exchange
        ways[count, 6], ways[count, 7], ways[count, 8] = terms.messages, terms.halo, terms.sets
        ways[count, 9] = terms.host
        # Pareto front: a way stays only if some pack may be faster by it.
        beaten = False
        for other in range(first, count):
            # On ties the earlier way stays: Ulysses degrees rise, so it is the lowest.
            beaten = beaten or _is_no_quicker(terms, terms_at(other, ways), degree, most, inputs)
        if beaten:
            continue
        # Drop the ways that the new one beats and compact the rest, with the new one last.
        kept = first
        for other in range(first, count + 1):
            if other == count or not _is_no_quicker(terms_at(other, ways), terms, degree, most, inputs):
                for term in range(TERMS):
                    ways[kept, term] = ways[other, term]
                kept += 1
        count = kept
    return count


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
def _spans(heads: int, across: int, inputs: PlannerInputs) -> bool:
    """Return whether Ulysses sets of `heads` ranks cross nodes."""
    # Sets are neighbouring ranks: they cross no node if their size divides the group's number of ranks on each node.
    return bool(heads > inputs.ranks_per_node or (across > 0 and across % heads != 0))


@inlined
def faster_tier(inputs: PlannerInputs) -> int:
    """Return 1 if bytes travel faster across nodes than inside one, else 0."""
    # All three are bytes over the same two bandwidths, so they order the tiers equally; summed, since some may be 0.
    prices = inputs.prices
    across = prices.ring[1] + prices.exchange[1] + prices.key_value_exchange[1]
    return 1 if across < prices.ring[0] + prices.exchange[0] + prices.key_value_exchange[0] else 0


@leaf
def _is_no_quicker(one: Any, other: Any, degree: int, most: int, inputs: PlannerInputs) -> bool:
    """Return whether way `one` takes at least as long as `other` for every pack of up to `most` tokens."""
    if one.host < other.host or (inputs.prices.reach and (one.halo < other.halo or one.sets < other.sets)):
        return False
    # Both ends suffice, since A and B are linear in the tokens.
    for tokens in (0, most):
        computed, moved = _ends(one, tokens, degree, inputs)
        other_computed, other_moved = _ends(other, tokens, degree, inputs)
        if computed < other_computed or moved < other_moved:
            return False
    return True


@inlined
def _ends(terms: Any, tokens: float, degree: int, inputs: PlannerInputs) -> Any:
    """Return A and B of a way (see `tabulated`) for a pack of `tokens` tokens."""
    # Without beta, attention and linear work, which are equal for all ways.
    parts = pack_parts(0.0, 0.0, tokens, degree, terms, inputs.prices)
    always = parts.other - inputs.prices.beta + parts.exposed
    return always + parts.attention, always + parts.hidden


@inlined
def traffic_of(tokens: int, degree: int, across: int, inputs: PlannerInputs) -> Any:
    """Return the least seconds of a pack's traffic, and the least growth per further token.

    The minimum of B(t) over all ways is concave, so it lies above its chord up to the group's capacity.
    """
    most = degree * inputs.tokens_per_rank
    # A share of 0 leaves B alone, the seconds of the messages.
    now = least_of_packs(0.0, tokens, 1.0, degree, across, inputs)
    growth = (least_of_packs(0.0, most, 1.0, degree, across, inputs) - now) / (most - tokens) if most > tokens else 0.0
    return now, growth


@inlined
def least_of_packs(
    hiding: float, tokens: float, packs: float, degree: int, across: int, inputs: PlannerInputs
) -> float:
    """Bound the total seconds of packs on one degree, without beta, linear work and h x their attention.

    max(a / d + A(t), B(t)) is at least any weighted mean h (a / d + A(t)) + (1 - h) B(t) with 0 <= h <= 1. Without
    h a / d, every way leaves a linear function of t. Their minimum over all ways, g(t), is concave and >= 0 at 0, so
    g(t) / t falls with t. Packs of at most d E tokens therefore take at least g(d E) / (d E) per token. Together they
    take no less than a single pack with all tokens.

    Args:
        hiding: h.
        tokens: tokens of all packs.
        packs: least number of packs that hold the tokens, in fractions; at least 1.
        degree, across, inputs: see `pack_seconds`.
    """
    splits, least = inputs.splits, np.inf
    row = splits.row_of_span[across + 1]
    for way in range(splits.first[row, degree], splits.first[row, degree + 1]):
        computed, moved = _ends(terms_at(way, splits.ways), tokens, degree, inputs)
        computed_empty, moved_empty = _ends(terms_at(way, splits.ways), 0.0, degree, inputs)
        fixed = hiding * computed_empty + (1.0 - hiding) * moved_empty
        least = min(least, hiding * computed + (1.0 - hiding) * moved + fixed * (packs - 1.0))
    return least


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
