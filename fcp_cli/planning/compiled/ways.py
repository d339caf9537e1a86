"""The ways in which a group of each degree may share heads and make rings, tabulated once for a machine.

What the k-th way takes of a pack is piecewise linear in its tokens t and its attention a (`core.way_terms`): it is the
larger of a + A(t) and B(t), with A(t) = (c + r) t + s and B(t) = (p + r) t + q + s, beside what all ways have in
common. One whose A and B are no less than those of another way, at no tokens and at as many as the group may hold, is
no quicker for any pack, since both are linear between: such are left out, unless they spare halos: bytes, or messages,
which are the more the more sets a ring has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.compiling import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import AT_BEST, Machine, Splits, way_terms


@kernel
def tabulated(machine: Machine) -> Any:
    """Return the splits of a machine with their tables, `lies`, `first` and `ways`."""
    splits = machine.splits
    lies, acrosses = _lies(machine)
    first = np.zeros((len(acrosses), machine.num_ranks + 2), dtype=np.int64)
    ways, count = np.zeros((len(acrosses) * (machine.num_ranks + 2), 7)), 0
    for row in range(len(acrosses)):
        for degree in range(2, machine.num_ranks + 1):
            first[row, degree] = count
            if count + len(splits.heads) + 1 > len(ways):  # one more than may be kept
                grown = np.zeros((2 * len(ways) + len(splits.heads) + 1, 7))
                grown[:count] = ways[:count]
                ways = grown
            count = _enter(degree, acrosses[row], count, ways, machine)
        first[row, machine.num_ranks + 1] = count
    return Splits(
        splits.heads,
        splits.copies,
        splits.inside,
        splits.across,
        splits.messages,
        splits.only,
        lies,
        first,
        ways[:count].copy(),
    )


@kernel
def _lies(machine: Machine) -> Any:
    """Return [across + 1] row of each `across`, and [rows] one `across` of each: those with the same sets share one."""
    heads = machine.splits.heads
    lies, acrosses = np.zeros(machine.ranks_per_node + 2, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for across in range(AT_BEST, machine.ranks_per_node + 1):
        row = 0
        while row < len(acrosses):
            alike = acrosses[row] > 0 and across > 0
            for k in range(len(heads)):
                alike = alike and (across % heads[k] == 0) == (acrosses[row] % heads[k] == 0)
            if alike:
                break
            row += 1
        if row == len(acrosses):
            acrosses = np.append(acrosses, across)
        lies[across + 1] = row
    return lies, acrosses


@leaf
def _enter(degree: int, across: int, first: int, ways: FloatArray, machine: Machine) -> int:
    """Write the ways of one degree from `first` on, of equals the one with the fewest heads; return where they end."""
    count, most = first, float(degree * machine.tokens_per_rank)
    for k in range(0 if machine.splits.only else -1, len(machine.splits.heads)):
        chunks, bytes_hidden, hops_hidden, bytes_beside, beside, halo, sets = way_terms(k, degree, across, machine)
        if beside == np.inf:
            continue
        ways[count, 0], ways[count, 1], ways[count, 2] = chunks, bytes_hidden, hops_hidden
        ways[count, 3], ways[count, 4], ways[count, 5], ways[count, 6] = bytes_beside, beside, halo, sets
        beaten = False
        for other in range(first, count):
            beaten = beaten or _is_no_quicker(count, other, most, ways, machine)
        if beaten:
            continue
        kept = first
        for other in range(first, count + 1):
            if other == count or not _is_no_quicker(other, count, most, ways, machine):
                for term in range(7):
                    ways[kept, term] = ways[other, term]
                kept += 1
        count = kept
    return count


@leaf
def _is_no_quicker(one: int, other: int, most: float, ways: FloatArray, machine: Machine) -> bool:
    """Return whether a way takes at least what another takes of every pack of up to `most` tokens."""
    if machine.reach and (ways[one, 5] < ways[other, 5] or ways[one, 6] < ways[other, 6]):
        return False
    chunks, bytes_hidden = ways[one, 0] - ways[other, 0], ways[one, 1] - ways[other, 1]
    bytes_beside, beside = ways[one, 3] - ways[other, 3], ways[one, 4] - ways[other, 4]
    hops = ways[one, 2] - ways[other, 2] + beside
    computed, moved = (chunks + bytes_beside) * most + beside, (bytes_hidden + bytes_beside) * most + hops
    return bool(min(beside, computed) >= 0.0 and min(hops, moved) >= 0.0)


@inlined
def least_of_packs(hiding: float, tokens: float, packs: float, degree: int, across: int, machine: Machine) -> float:
    """Bound what so many packs take beside beta, linear work and a share `hiding` of attention, on one degree.

    The larger of a / d + c t and p t + q is at least any mean of them, h (a / d + c t) + (1 - h) (p t + q), h from 0 to
    1. Beside h a / d each way leaves a linear function of t. The least of these over the ways, g(t), is concave and not
    negative at 0, so that g(t) / t falls: packs of at most dE tokens take g(dE) / dE for each of theirs at least, and
    all together no less than one pack that holds everything, g of all tokens.

    Args:
        hiding: h.
        tokens: of all packs.
        packs: as few as hold them, in fractions; 1 at least.
        degree, across, machine: as for `pack_seconds`.
    """
    splits, least = machine.splits, np.inf
    row = splits.lies[across + 1]
    for k in range(splits.first[row, degree], splits.first[row, degree + 1]):
        per_token = hiding * splits.ways[k, 0] + (1.0 - hiding) * splits.ways[k, 1] + splits.ways[k, 3]
        least = min(least, per_token * tokens + ((1.0 - hiding) * splits.ways[k, 2] + splits.ways[k, 4]) * packs)
    return least
