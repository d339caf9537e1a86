"""The ways in which a group of each degree may share heads and make rings, tabulated once for the ranks.

The seconds of a pack of t tokens and a of attention are, fixed and linear seconds aside, the larger of a / d + A(t) and
B(t), both linear in t (`ends`). A way whose A and B are no less than those of another way, at no tokens and at as many
as the group may hold, is no quicker for any pack, since both are linear between: such ways are skipped, unless they
save bytes or messages of halos, of which a ring has the more the more sets it has.
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
    # One extra degree, so that `first` also holds the end of the last one's ways.
    first = np.zeros((len(acrosses), inputs.num_ranks + 2), dtype=np.int64)
    # One way a degree is all that rings of single ranks have; split heads make it grow.
    ways, count = np.zeros((len(acrosses) * (inputs.num_ranks + 2), 9)), 0
    for row in range(len(acrosses)):
        # From 2 on: a single rank has no way. Callers price it without the table, in which its row means nothing.
        for degree in range(2, inputs.num_ranks + 1):
            first[row, degree] = count
            if count + len(splits.heads) + 1 > len(ways):  # one more than may be kept
                # Doubled, since numba has no growing array of rows.
                grown = np.zeros((2 * len(ways) + len(splits.heads) + 1, 9))
                grown[:count] = ways[:count]
                ways = grown
            count = _enter(degree, acrosses[row], count, ways, inputs)
        first[row, inputs.num_ranks + 1] = count
    # A copy, since a slice would keep the whole doubled array.
    return Splits(splits.heads, splits.only, row_of_span, first, ways[:count].copy())


@kernel
def _rows_of_spans(inputs: PlannerInputs) -> Any:
    """Return [across + 1] row of each `across`, and [rows] one `across` of each: those with the same sets share one."""
    heads = inputs.splits.heads
    row_of_span, acrosses = np.zeros(inputs.ranks_per_node + 2, dtype=np.int64), np.zeros(0, dtype=np.int64)
    # UNPLACED and 0 get rows of their own: `way_terms` prices them by other rules.
    for across in range(UNPLACED, inputs.ranks_per_node + 1):
        row = 0
        while row < len(acrosses):
            # Only divisibility by a heads degree matters: two spans that agree on it have equal prices.
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
    """Write the ways of one degree from `first` on, of equals the one with the fewest heads; return their end."""
    count, most = first, degree * inputs.tokens_per_rank
    for k in range(-1, len(inputs.splits.heads)):
        if not is_way(k, degree, across, inputs):
            continue
        terms = way_terms(k, degree, across, inputs)
        # The row behind the last is scratch, written before it is known whether the way stays.
        ways[count, 0], ways[count, 1], ways[count, 2] = terms.chunk, terms.ring, terms.hops
        ways[count, 3], ways[count, 4], ways[count, 5] = terms.home, terms.home_hop, terms.exchange
        ways[count, 6], ways[count, 7], ways[count, 8] = terms.messages, terms.halo, terms.sets
        # Pareto front: a way stays only if some pack may be quicker by it.
        beaten = False
        for other in range(first, count):
            # On ties the earlier one stays, which splits fewer heads: the heads degrees rise.
            beaten = beaten or _is_no_quicker(terms, terms_at(other, ways), degree, most, inputs)
        if beaten:
            continue
        # Drop the ways that the new one beats, and close up the rest, the new one last.
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
    """Return A and B of a way for a pack of so many tokens."""
    # Without beta, attention and linear work, which are the same by every way.
    parts = pack_parts(0.0, 0.0, tokens, degree, terms, inputs.prices)
    always = parts.other - inputs.prices.beta + parts.exposed
    return always + parts.attention, always + parts.hidden


@leaf
def _is_no_quicker(one: Any, other: Any, degree: int, most: int, inputs: PlannerInputs) -> bool:
    """Return whether a way takes at least as long as another one for every pack of up to `most` tokens."""
    if inputs.prices.reach and (one.halo < other.halo or one.sets < other.sets):
        return False
    # Both ends are enough: A and B are linear in the tokens.
    for tokens in (0, most):
        computed, moved = _ends(one, tokens, degree, inputs)
        other_computed, other_moved = _ends(other, tokens, degree, inputs)
        if computed < other_computed or moved < other_moved:
            return False
    return True


@inlined
def traffic_of(tokens: int, degree: int, across: int, inputs: PlannerInputs) -> Any:
    """Return the least seconds of a pack's traffic, and by how much each further token lengthens them at least.

    The least over the ways of B(t) is concave, so that it lies above its chord up to a group's capacity.
    """
    most = degree * inputs.tokens_per_rank
    # A share of 0 hides nothing: B alone, the seconds in which messages travel.
    now = least_of_packs(0.0, tokens, 1.0, degree, across, inputs)
    growth = (least_of_packs(0.0, most, 1.0, degree, across, inputs) - now) / (most - tokens) if most > tokens else 0.0
    return now, growth


@inlined
def least_of_packs(
    hiding: float, tokens: float, packs: float, degree: int, across: int, inputs: PlannerInputs
) -> float:
    """Bound the seconds of so many packs, without beta, linear work and a share `hiding` of attention, on one degree.

    The larger of a / d + A(t) and B(t) is at least any mean of them, h (a / d + A(t)) + (1 - h) B(t), h from 0 to 1.
    Without h a / d each way leaves a linear function of t. The least of these over the ways, g(t), is concave and not
    negative at 0, so that g(t) / t falls: packs of at most dE tokens take g(dE) / dE for each of theirs at least, and
    all together no less than one pack that holds everything, g of all tokens.

    Args:
        hiding: h.
        tokens: the tokens of all packs.
        packs: the packs, as few as hold them, in fractions; 1 at least.
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
