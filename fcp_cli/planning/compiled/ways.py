"""Table of the ways to run a group of each degree: as a ring, a Ulysses set, or a ring of Ulysses sets.

Apart from fixed and linear seconds, a pack of t tokens with a seconds of attention takes max(a / d + A(t), B(t)); A and
B are linear in t (`_ends`). If neither A nor B of a way is smaller than those of another way at 0 tokens and at the
group's capacity, the way is never faster and is dropped. The exception is a way with fewer bytes or messages of halos,
which grow with the number of sets.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import UNPLACED, PlannerInputs, Splits, is_way, pack_parts, terms_at, way_terms


@kernel
def tabulated(inputs: PlannerInputs) -> Any:
    """Return the splits with their tables, `row_of_span`, `first` and `ways`."""
    splits = inputs.splits
    row_of_span, acrosses = _rows_of_spans(inputs)
    # One extra column, so that `first` also holds the end of the last degree's ways.
    first = np.zeros((len(acrosses), inputs.num_ranks + 2), dtype=np.int64)
    # Enough for one way per degree (rings of single ranks); grown if there are Ulysses sets.
    ways, count = np.zeros((len(acrosses) * (inputs.num_ranks + 2), 9)), 0
    for row in range(len(acrosses)):
        # From 2 on: callers price single ranks without the table.
        for degree in range(2, inputs.num_ranks + 1):
            first[row, degree] = count
            if count + len(splits.heads) + 1 > len(ways):  # `_enter` needs one scratch row
                # Doubled, since numba has no growable array of rows.
                grown = np.zeros((2 * len(ways) + len(splits.heads) + 1, 9))
                grown[:count] = ways[:count]
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
    row_of_span, acrosses = np.zeros(inputs.ranks_per_node + 2, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # UNPLACED and 0 get separate rows, since `way_terms` prices them by other rules.
    for across in range(UNPLACED, inputs.ranks_per_node + 1):
        row = 0
        while row < len(acrosses):
            # Prices only depend on the Ulysses degrees that divide `across`.
            alike = acrosses[row] > 0 and across > 0
            for k in range(len(heads)):
                alike = alike and (across % heads[k] == 0) == (acrosses[row] % heads[k] == 0)
            if alike:
                break
            row += 1
        if row == len(acrosses):
            acrosses = np.append(acrosses, across)
        row_of_span[across + 1] = row
    return row_of_span, acrosses


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
                for term in range(9):
                    ways[kept, term] = ways[other, term]
                kept += 1
        count = kept
    return count


@inlined
def _ends(terms: Any, tokens: float, degree: int, inputs: PlannerInputs) -> Any:
    """Return A and B of a way (see the module) for a pack of `tokens` tokens."""
    # Without beta, attention and linear work, which are equal for all ways.
    parts = pack_parts(0.0, 0.0, tokens, degree, terms, inputs.prices)
    always = parts.other - inputs.prices.beta + parts.exposed
    return always + parts.attention, always + parts.hidden


@leaf
def _is_no_quicker(one: Any, other: Any, degree: int, most: int, inputs: PlannerInputs) -> bool:
    """Return whether way `one` takes at least as long as `other` for every pack of up to `most` tokens."""
    if inputs.prices.reach and (one.halo < other.halo or one.sets < other.sets):
        return False
    # Both ends suffice, since A and B are linear in the tokens.
    for tokens in (0, most):
        computed, moved = _ends(one, tokens, degree, inputs)
        other_computed, other_moved = _ends(other, tokens, degree, inputs)
        if computed < other_computed or moved < other_moved:
            return False
    return True


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
