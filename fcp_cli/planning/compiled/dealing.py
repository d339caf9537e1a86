"""Lower bound of waves over every way to deal the sequences with the most work to waves; notation of `certificate`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.compiling.compile import inlined, kernel
from fcp_cli.planning.compiled.alone import alone_at_best, at_best, work_in_rings
from fcp_cli.planning.compiled.certificate import exchange_seconds, ring_area
from fcp_cli.planning.compiled.core import (
    Load,
    PlannerInputs,
    Sequences,
    falling_order,
    pack_seconds,
    sequence_load,
    together,
    total_of,
)

_DEALT = (2, 3, 6, 8)  # sequences that are dealt in every way: 2^8 waves at most, 3^8 ways to complete a set of them
_TRIED = 1 << 21  # packs beside packs on fewer ranks of a small step; some milliseconds
_GRID = 1.004  # ratio of the lengths of a wave that are tried; the bound loses no more than that
_LONGER, _STRETCH = 6, 1.06  # lengths beyond those at which all dealt sequences have their least areas
# The densest sequences from the k-th on that fill such a part of a wave: the last of them sets a price of tokens.
_FILLS = ((2, 0.1), (2, 0.5), (8, 0.25), (8, 0.5))
_MARGIN = 1e-9  # relative; keeps rounding on the safe side


@kernel
def dealt_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the larger of `at_least` and the least makespan under waves, over all ways to deal the longest sequences.

    A step of few sequences on few ranks is dealt whole.
    """
    n = len(sequences.work)
    if n <= _DEALT[-1] and 3**n * inputs.num_ranks * inputs.num_ranks <= _TRIED:
        bound = least_partition(whole_waves(sequences, inputs)) * (1.0 - _MARGIN)
    else:
        bound = dealt_with_others(sequences, inputs)
    return float(max(at_least, bound))


@kernel
def dealt_with_others(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least makespan under waves, over all ways to deal the longest sequences, others beside them.

    The waves that hold any of the sequences with the most work share these out: the least sum over all partitions of
    what each part adds to a makespan (`_waves_with_others`) bounds it. Any count of dealt sequences, and any price of
    a token of the others, gives a bound.
    """
    n, room = len(sequences.work), inputs.num_ranks * inputs.tokens_per_rank
    fixed = inputs.prices.beta * ((total_of(sequences.tokens) + room - 1) // room)
    ringed = work_in_rings(np.inf, sequences, inputs)
    tables = _wave_tables(min(n, _DEALT[-1]), sequences, inputs)
    density = ringed / sequences.tokens
    by_density = falling_order(density)
    best = 0.0
    for first, fill in _FILLS:
        price, taken = 0.0, 0.0
        for i in by_density:
            if i >= first and taken < fill * room:
                taken += sequences.tokens[i]
                price = density[i]
        # For all counts at once: they share the first sequences.
        idle, alone = _with_price(price, tables, inputs)
        for dealt in _DEALT:
            count, cheap = min(dealt, n), 0.0
            for i in range(count, n):
                cheap += min(ringed[i], price * sequences.tokens[i])
            parts = _waves_with_others(count, price, tables, idle, alone, sequences, inputs)
            best = max(best, fixed + cheap / inputs.num_ranks + least_partition(parts))
    return float(best * (1.0 - _MARGIN))


@kernel
def least_partition(parts: FloatArray) -> float:
    """Return the least sum of [2^n] values over a partition of all n members into the parts of these masks."""
    least = np.full(len(parts), np.inf)
    least[0] = 0.0
    for mask in range(1, len(parts)):
        # One part of a partition has the lowest member, so only such parts are taken: each partition is met once. All
        # masks and their parts are 3^n.
        lowest, part = mask & -mask, mask
        while part:
            if part & lowest:
                least[mask] = min(least[mask], parts[part] + least[mask ^ part])
            part = (part - 1) & mask
    return float(least[-1])


@kernel
def whole_waves(sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [2^n] least seconds of a wave of the sequences of each mask, in packs on ranks that lie at best.

    On r ranks the pack with the first sequence takes some d of them, and the others the rest.
    """
    ranks, count = inputs.num_ranks, 1 << len(sequences.work)
    packs, waves = np.full((count, ranks + 1), np.inf), np.full((count, ranks + 1), np.inf)
    # Ranks that nothing is left for wait until the floor, below which no wave ends.
    waves[0] = inputs.floor
    for mask in range(1, count):
        load = Load(0.0, 0.0, 0, 0, np.iinfo(np.int64).max)
        for i in range(len(sequences.work)):
            if mask >> i & 1:
                load = together(load, sequence_load(i, sequences, inputs))
        for degree in range(1, ranks + 1):
            # No slower than on fewer ranks: others may stay idle, as ranks of a wave may.
            packs[mask, degree] = packs[mask, degree - 1]
            if load.tokens <= degree * inputs.tokens_per_rank:
                seconds = pack_seconds(load, degree, at_best(degree, inputs), inputs)
                packs[mask, degree] = min(packs[mask, degree], seconds)
        part = mask
        while part:
            # The pack with the first sequence, as in `least_partition`.
            if part & mask & -mask:
                for held in range(1, ranks + 1):
                    for degree in range(1, held + 1):
                        seconds = max(packs[part, degree], waves[mask ^ part, held - degree])
                        waves[mask, held] = min(waves[mask, held], seconds)
            part = (part - 1) & mask
    # A column is strided, and numba would compile `least_partition` once more for such arrays.
    return np.ascontiguousarray(waves[:, ranks])


class WaveTables(NamedTuple):
    """Lengths of a wave at which the sequences that are dealt have another least area.

    Attributes:
        seconds: [lengths] of a wave, rising; each stands for those up to the next.
        least: [dealt, lengths] least area of each sequence in them, infinite if it does not end in time.
        ends: [dealt, num_ranks + 1] seconds of each sequence alone on each degree, infinite if it does not fit.
        areas: [dealt, num_ranks + 1] least area of each on each degree.
    """

    seconds: FloatArray
    least: FloatArray
    ends: FloatArray
    areas: FloatArray


@kernel
def _wave_tables(count: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make the tables. Lengths closer than `_GRID` are taken together: the shortest, and the areas of the longest."""
    outlasting = 0.0
    for i in range(len(sequences.work)):
        outlasting = max(outlasting, sequences.attention[i] / sequences.tokens[i])
    ends = np.full((count, inputs.num_ranks + 1), np.inf)
    areas = np.full((count, inputs.num_ranks + 1), np.inf)
    for i in range(count):
        lowest = (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
        for degree in range(max(1, lowest), inputs.num_ranks + 1):
            ends[i, degree] = alone_at_best(i, degree, sequences, inputs)
            areas[i, degree] = _area_on(i, degree, outlasting, sequences, inputs)
    most = ends.size + _LONGER
    seconds, least = np.zeros(most), np.full((count, most), np.inf)
    k = -1
    # By rising end; what does not fit is last, at infinity.
    for at in falling_order(-ends.ravel()):
        i, degree = at // (inputs.num_ranks + 1), at % (inputs.num_ranks + 1)
        if ends[i, degree] == np.inf:
            break
        if k >= 0 and areas[i, degree] >= least[i, k]:
            continue  # a wider ring: nothing changes
        if k < 0 or ends[i, degree] > seconds[k] * _GRID:
            k += 1
            seconds[k] = ends[i, degree]
            # A longer wave admits all that ends in a shorter one.
            least[:, k] = least[:, max(0, k - 1)]
        least[i, k] = areas[i, degree]
    for _longer in range(_LONGER):
        k += 1
        seconds[k], least[:, k] = seconds[k - 1] * _STRETCH, least[:, k - 1]
    return WaveTables(seconds[: k + 1].copy(), least[:, : k + 1].copy(), ends, areas)


@inlined
def _area_on(i: int, degree: int, outlasting: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds of a sequence in packs of this degree, or wider ones that split heads."""
    least = np.inf
    if degree == 1 or not inputs.splits.only:
        least, _hidden = ring_area(i, degree, degree, outlasting, sequences, inputs)
    for k in range(len(inputs.splits.heads) if degree > 1 else 0):
        sets = (degree + inputs.splits.heads[k] - 1) // inputs.splits.heads[k]
        if sets == 1 or not inputs.splits.only:
            area, _hidden = ring_area(i, degree, sets, outlasting, sequences, inputs)
            least = min(least, area + exchange_seconds(k, inputs) * sequences.tokens[i])
    return float(least)


@kernel
def _with_price(price: float, tables: WaveTables, inputs: PlannerInputs) -> Any:
    """Return [lengths + 1] m and [dealt, lengths, 2] least A - d m+ of each sequence at m of a length and of the next.

    m are the seconds that a rank without any of the dealt sequences waits for the end of the wave, at a price of a
    token, negative if time runs out first, and m+ is m or 0. A pack of d ranks saves the wave d m+.
    """
    seconds, ends = tables.seconds, tables.ends
    idle = np.full(len(seconds) + 1, np.inf)
    for k in range(len(seconds)):
        idle[k] = max(seconds[k], inputs.floor) - inputs.prices.beta - price * inputs.tokens_per_rank
    alone = np.full((len(ends), len(seconds), 2), np.inf)
    for i in range(len(ends)):
        for k in range(len(seconds)):
            for side in range(2):
                # Infinite behind the last length, for which no second side is read.
                waits = max(0.0, idle[k + side])
                for degree in range(1, inputs.num_ranks + 1):
                    # Whatever ends before the next length may have ended in time.
                    if k + 1 == len(seconds) or ends[i, degree] < seconds[k + 1]:
                        alone[i, k, side] = min(alone[i, k, side], tables.areas[i, degree] - degree * waits)
    return idle, alone


@kernel
def _waves_with_others(
    count: int,
    price: float,
    tables: WaveTables,
    idle: FloatArray,
    alone: FloatArray,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> FloatArray:
    """Return [2^count] what a wave that holds the sequences of each mask adds to the makespan, without beta.

    Let it last T, and hold x tokens of them, of which each takes the area A(d) on d ranks. Others do y work in it, a
    token `price` and what `dealt_bound` leaves to them in all waves together; what it does not do, others do at best
    evenly. So it adds T - beta - y / N. A pack of d ranks has y <= d (T - beta) - sum of A, and y <= price (d E - x);
    a rank outside has y <= min(T - beta, price E), and waits m = T - beta - price E otherwise. So N times what it adds
    is at least sum of A, and N m + price x, and, with m+ = max(0, m), N m+ + sum of min over d of (A(d) - d m+). The
    second grows with T, and the last is concave in it, so that up to the next length its least is at either end.
    """
    ranks, last = inputs.num_ranks, len(tables.seconds) - 1
    adds, tokens = np.full(1 << count, np.inf), np.zeros(1 << count)
    held, kept = np.zeros((1 << count, last + 1)), np.zeros((1 << count, last + 1, 2))
    for mask in range(1, 1 << count):
        # Masks rise, so that the sums without the lowest member are known.
        rest, i = mask & (mask - 1), 0
        while not mask >> i & 1:
            i += 1
        tokens[mask] = tokens[rest] + sequences.tokens[i]
        for k in range(last + 1):
            held[mask, k] = held[rest, k] + tables.least[i, k]
            # Infinite if one of them does not end in time.
            if held[mask, k] == np.inf or tokens[mask] > ranks * inputs.tokens_per_rank:
                continue
            least = max(held[mask, k], ranks * idle[k] + price * tokens[mask])
            # The last length stands for all that are longer: only the terms that never fall with it count.
            if k < last:
                beside = np.inf
                for side in range(2):
                    kept[mask, k, side] = kept[rest, k, side] + alone[i, k, side]
                    beside = min(beside, ranks * max(0.0, idle[k + side]) + kept[mask, k, side])
                least = max(least, beside)
            adds[mask] = min(adds[mask], least / ranks)
    return adds
