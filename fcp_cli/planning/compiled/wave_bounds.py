"""Lower bounds of waves from their heaviest sequences; notation as in `certificate`.

`crowd_bound` takes them together, as a crowd: either some wave holds all of them, or at least two waves hold some.
`dealt_bound` takes the least over all ways to deal a few of them to waves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.certificate import (
    Densities,
    alone_at_best,
    at_best,
    densities,
    exchange_seconds,
    first_not_below,
    other_waves,
    ring_area,
    traffic_seconds,
    wave_bound,
    work_in_rings,
)
from fcp_cli.planning.compiled.core import (
    Load,
    PlannerInputs,
    Sequences,
    falling_order,
    least_degree,
    pack_seconds,
    sequence_load,
    together,
    total_of,
)
from fcp_cli.util.arrays import FloatArray
from fcp_cli.util.compiling import inlined, kernel

_NARROWINGS = 4  # bisection steps for the largest refuted makespan
_GRID = 1.003  # ratio of consecutive wave durations tried; the bound loses no more than this
_MARGIN = 1e-9  # relative; keeps rounding on the safe side
_DEALT = (2, 3, 6, 8)  # numbers of sequences dealt in all ways: at most 2^8 waves, and 3^8 (wave, sub-wave) pairs
_TRIED = 1 << 21  # largest effort for which a small step is dealt whole; some milliseconds
_DURATION_GRID = 1.004  # ratio of consecutive wave durations tried; the bound loses no more than this
_LONGER, _STRETCH = 6, 1.06  # durations added beyond the one at which all dealt sequences have their least areas
# (k, share): the price of a token is the density at which the densest of sequences k, k + 1, ... fill that share of a
# wave.
_FILLS = ((2, 0.1), (2, 0.5), (8, 0.25), (8, 0.5))


@kernel
def waves_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the largest of `at_least`, `ringed_bound` and `dealt_bound`."""
    return max(ringed_bound(at_least, sequences, inputs), dealt_bound(sequences, inputs))


@kernel
def ringed_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the larger of `wave_bound` and `crowd_bound`, both with the cost of rings; `at_least` if that is higher.

    In a schedule that ends before B, no wave outlasts B - `other_waves`, so each sequence has a ring wide enough to end
    by then. If the bounds with that ring work are B or more, no such schedule exists. Both bounds fall with B, so the
    largest such B lies between the bound without a limit on waves and the bound with that bound as the limit.
    """
    others = other_waves(sequences, inputs)
    refuted = _bound_of_waves(np.inf, at_least, sequences, inputs)
    # With Ulysses sets no ring is certain (`work_in_rings`), so a limit changes nothing.
    high = refuted if len(inputs.splits.heads) else _bound_of_waves(refuted - others, refuted, sequences, inputs)
    makespan = high
    # Try the upper end first: it is often refuted, which ends the loop. Then bisect.
    for _narrowing in range(_NARROWINGS):
        if high <= refuted * (1.0 + _MARGIN):
            break
        if _bound_of_waves(makespan - others, 0.0, sequences, inputs) >= makespan:
            refuted = makespan
        else:
            high = makespan
        makespan = 0.5 * (refuted + high)
    return float(refuted)


@kernel
def _bound_of_waves(longest_wave: float, at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    # Still sorted by plain work: the bounds hold for any crowd and any sequence, so the order need not be exact.
    ringed = Sequences(
        sequences.attention, sequences.linear, work_in_rings(longest_wave, sequences, inputs), sequences.tokens
    )
    return float(crowd_bound(max(at_least, wave_bound(ringed, inputs)), ringed, inputs))


@kernel
def crowd_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return a lower bound of the makespan under waves, from the heaviest sequences; `at_least` if that is higher.

    Take the `count` heaviest sequences. Either at least two waves hold some of them: then one lasts at least as long as
    the heaviest sequence, another as the least member. Or one wave holds them all: then it lasts some tau, at least as
    long as the heaviest sequence, does at most `_most_done` work, which grows with tau, and other waves do the rest.
    tau is covered by the intervals of a grid. In each, the wave lasts at least the lower end and does at most the work
    that the upper end allows. Every count gives a bound; powers of two are tried.
    """
    n = len(sequences.work)
    total, tokens = total_of(sequences.work), total_of(sequences.tokens)
    more_waves = (tokens - 1) // (inputs.num_ranks * inputs.tokens_per_rank)
    density = densities(sequences)
    # Sequence 0 is in every crowd, so one of its waves lasts at least this long.
    longest = np.inf
    for degree in range(least_degree(0, sequences, inputs), inputs.num_ranks + 1):
        longest = min(longest, alone_at_best(0, degree, sequences, inputs))
    best, count = at_least, 2
    while count <= n:
        crowd = _make_crowd(count, density, sequences, inputs)
        count *= 2
        shortest = np.inf
        for degree in range(1, inputs.num_ranks + 1):
            shortest = min(shortest, _least_member(degree, crowd, inputs))
        # The case of two waves, which leaves one further wave less.
        bound = longest + shortest + inputs.prices.beta * max(0, more_waves - 1)
        if bound <= best:
            break  # a larger crowd has a smaller least member
        makespan = longest
        # The case of one wave, until it is as long as two and cannot lower the minimum.
        while bound > best and makespan + inputs.prices.beta * more_waves < bound:
            step_end = makespan * _GRID
            done = _most_done(step_end, crowd, inputs)
            if done >= 0.0:
                rest = total - done
                # Remaining work takes a wave, even if all tokens would fit into this one.
                waves = max(more_waves, 1 if rest > _MARGIN * total else 0)
                bound = min(bound, makespan + inputs.prices.beta * waves + max(0.0, rest) / inputs.num_ranks)
            makespan = step_end
        best = max(best, bound * (1.0 - _MARGIN))
    return float(best)


class Crowd(NamedTuple):
    """The heaviest sequences of a step, and sums over the others.

    Attributes:
        members: number of sequences in the crowd.
        work, tokens: sums over the crowd.
        least: lower bound of the load of any sequence of the crowd, field by field.
        densest: greatest w / t of any other sequence.
        held_tokens, held_work: [others + 1] prefix sums over the others by falling density.
        thin: least l / t of any sequence, in the crowd or not.
    """

    members: int
    work: float
    tokens: float
    least: Load
    densest: float
    held_tokens: FloatArray
    held_work: FloatArray
    thin: float


@kernel
def _make_crowd(count: int, density: Densities, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make the crowd of the `count` heaviest sequences."""
    others = len(sequences.work) - count
    held_tokens, held_work = np.zeros(others + 1), np.zeros(others + 1)
    k = 0
    for i in density.falling:
        # Positions are by falling work, so the crowd is 0 to count - 1.
        if i >= count:
            held_tokens[k + 1] = held_tokens[k] + sequences.tokens[i]
            held_work[k + 1] = held_work[k] + sequences.work[i]
            k += 1
    return Crowd(
        count,
        total_of(sequences.work[:count]),
        float(total_of(sequences.tokens[:count])),
        _least_load(count, sequences, inputs),
        # The first of the others is the densest.
        held_work[1] / held_tokens[1] if others else 0.0,
        held_tokens,
        held_work,
        density.thin,
    )


@kernel
def _least_load(count: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the field-wise least load of the first `count` sequences, a lower bound for each of them."""
    # `shortest` is the maximum instead: the longer the shortest sequence, the fewer halo messages.
    attention, linear = sequences.attention[0], sequences.linear[0]
    fewest, most = sequences.tokens[0], sequences.tokens[0]
    for i in range(1, count):
        attention, linear = min(attention, sequences.attention[i]), min(linear, sequences.linear[i])
        fewest, most = min(fewest, sequences.tokens[i]), max(most, sequences.tokens[i])
    return Load(attention, linear, fewest, min(fewest, 2 * inputs.prices.reach), most)


@kernel
def _least_member(degree: int, crowd: Crowd, inputs: PlannerInputs) -> float:
    """Return a lower bound of a pack of this degree that holds a member of the crowd; infinite if none fits."""
    if degree * inputs.tokens_per_rank < crowd.least.tokens:
        return np.inf
    return pack_seconds(crowd.least, degree, at_best(degree, inputs), inputs)


@kernel
def _most_done(makespan: float, crowd: Crowd, inputs: PlannerInputs) -> float:
    """Return the most work of a wave that holds the whole crowd and ends by `makespan`; -1 if no wave can.

    A pack of degree d ends in time only with at most t(d) = min(d E, d (makespan - beta - hops) / (thin + c_d (d - 1)))
    tokens, since its linear seconds and its ring do not overlap. If it holds members M of the crowd, it does at most
    sum over M (w - densest t) + densest t(d) work. Its degree ends in time with the least member of the crowd, and it
    holds at most floor(max t(d) / least t) members. So there are at least P such packs, and at most one per member. The
    other ranks do at most S(their tokens) work, where S(x) is the work of the densest x tokens of the others. S is
    concave: S(x) <= S(x0) + S'(x0) (x - x0) for x <= x0, the tokens that P packs leave (S' from the left). So each pack
    with members adds at most densest t(d) work and takes S'(x0) d E from the rest; its best degree bounds the sum. No
    wave does more than N (makespan - beta).
    """
    num_ranks, tokens_per_rank = inputs.num_ranks, inputs.tokens_per_rank
    narrowest, most_tokens = 0, 0.0
    for degree in range(1, num_ranks + 1):
        if narrowest == 0 and _least_member(degree, crowd, inputs) <= makespan:
            narrowest = degree
        if narrowest:
            most_tokens = max(most_tokens, _most_tokens(degree, makespan, crowd.thin, inputs))
    # The margin guards the floor: one member too many in a pack only weakens the bound.
    together = int(most_tokens / crowd.least.tokens * (1.0 + _MARGIN))
    if narrowest == 0 or together == 0:
        return -1.0
    packs = (crowd.members + together - 1) // together
    # The crowd's packs alone need too many ranks.
    if packs * narrowest > num_ranks:
        return -1.0
    room = float((num_ranks - packs * narrowest) * tokens_per_rank)
    k = first_not_below(room, crowd.held_tokens)
    slope, held = 0.0, crowd.held_work[k]
    # x0 lies within the k-th of the others, which counts in part. Beyond the last one the slope is 0.
    if k and crowd.held_tokens[k] >= room:
        slope = (crowd.held_work[k] - crowd.held_work[k - 1]) / (crowd.held_tokens[k] - crowd.held_tokens[k - 1])
        held -= slope * (crowd.held_tokens[k] - room)
    # Best gain of a pack; negative if it takes more work from the other ranks than it adds.
    best = -np.inf
    for degree in range(narrowest, num_ranks + 1):
        if _least_member(degree, crowd, inputs) <= makespan:
            # Wider degrees may end too late: seconds jump where groups begin to cross nodes.
            tokens = _most_tokens(degree, makespan, crowd.thin, inputs)
            best = max(best, crowd.densest * tokens - slope * degree * tokens_per_rank)
    done = crowd.work - crowd.densest * crowd.tokens + held + slope * packs * narrowest * tokens_per_rank
    # A gain counts for the largest possible number of packs, a loss for the smallest.
    done += best * (crowd.members if best > 0.0 else packs)
    return float(min(done, num_ranks * (makespan - inputs.prices.beta)))


@inlined
def _most_tokens(degree: int, makespan: float, thin: float, inputs: PlannerInputs) -> float:
    """Return t(d) of `_most_done`: the most tokens of a pack of this degree that ends in time."""
    most = 0.0
    for k in range(-1, len(inputs.splits.heads) if degree > 1 else 0):
        sets, exchange = degree, 0.0
        if k >= 0:
            # Sets must divide the group.
            if degree % inputs.splits.heads[k]:
                continue
            sets, exchange = degree // inputs.splits.heads[k], exchange_seconds(k, inputs)
        per_token = thin + traffic_seconds(degree, sets, inputs) + exchange
        held = float(degree * inputs.tokens_per_rank)
        if per_token > 0.0:
            held = min(held, degree * (makespan - inputs.prices.beta - inputs.prices.hop * (sets - 1)) / per_token)
        # The maximum over all ways, since any pack may use any of them.
        most = max(most, held)
    return most


@kernel
def dealt_bound(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the bound of waves over all ways to deal the heaviest sequences; few on few ranks are dealt whole."""
    n = len(sequences.work)
    if n <= _DEALT[-1] and 3**n * inputs.num_ranks * inputs.num_ranks <= _TRIED:
        return float(least_partition(whole_waves(sequences, inputs)) * (1.0 - _MARGIN))
    return float(dealt_with_others(sequences, inputs))


@kernel
def least_partition(parts: FloatArray) -> float:
    """Return the least sum of `parts` ([2^n], by mask) over all partitions of the n members."""
    least = np.full(len(parts), np.inf)
    least[0] = 0.0
    for mask in range(1, len(parts)):
        # Only parts with the lowest member, so that each partition is visited once. All (mask, part) pairs: under 3^n.
        lowest, part = mask & -mask, mask
        while part:
            if part & lowest:
                least[mask] = min(least[mask], parts[part] + least[mask ^ part])
            part = (part - 1) & mask
    return float(least[-1])


@kernel
def whole_waves(sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [2^n] the least seconds of a wave of the sequences of each mask, with all packs at the best placement.

    On r ranks the pack with the first sequence takes some d of them, and the other packs the rest.
    """
    ranks, count = inputs.num_ranks, 1 << len(sequences.work)
    packs, waves = np.full((count, ranks + 1), np.inf), np.full((count, ranks + 1), np.inf)
    # No wave ends before the floor.
    waves[0] = inputs.floor
    for mask in range(1, count):
        load = Load(0.0, 0.0, 0, 0, np.iinfo(np.int64).max)
        for i in range(len(sequences.work)):
            if mask >> i & 1:
                load = together(load, sequence_load(i, sequences, inputs))
        for degree in range(1, ranks + 1):
            # No slower than on fewer ranks, since the others may idle.
            packs[mask, degree] = packs[mask, degree - 1]
            if load.tokens <= degree * inputs.tokens_per_rank:
                seconds = pack_seconds(load, degree, at_best(degree, inputs), inputs)
                packs[mask, degree] = min(packs[mask, degree], seconds)
        part = mask
        while part:
            # Only packs with the lowest sequence, as in `least_partition`.
            if part & mask & -mask:
                for held in range(1, ranks + 1):
                    for degree in range(1, held + 1):
                        seconds = max(packs[part, degree], waves[mask ^ part, held - degree])
                        waves[mask, held] = min(waves[mask, held], seconds)
            part = (part - 1) & mask
    found: FloatArray = waves[:, ranks].copy()
    return found


@kernel
def dealt_with_others(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return a lower bound of the makespan under waves, over all ways to deal the heaviest sequences.

    The waves that hold dealt sequences partition them. Each part adds a least number of seconds to the makespan,
    whatever other sequences run in its wave (`_waves_with_others`); the least sum over all partitions is the bound. Any
    number of dealt sequences, and any price of a token of the others, gives a valid bound.
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
        # One table for all counts, which share the first sequences.
        priced = _with_price(price, tables, inputs)
        for dealt in _DEALT:
            count, cheap = min(dealt, n), 0.0
            for i in range(count, n):
                cheap += min(ringed[i], price * sequences.tokens[i])
            parts = _waves_with_others(count, tables, priced, sequences, inputs)
            best = max(best, fixed + cheap / inputs.num_ranks + least_partition(parts))
    return float(best * (1.0 - _MARGIN))


class WaveTables(NamedTuple):
    """Durations of a wave at which the least area of some dealt sequence changes.

    Attributes:
        seconds: [durations] of a wave, rising; each stands for the interval up to the next.
        least: [dealt, durations] least area of each sequence in such a wave; infinite if it does not end in time.
        ends: [dealt, num_ranks + 1] seconds of each sequence alone on each degree; infinite if it does not fit.
        areas: [dealt, num_ranks + 1] least area of each sequence on each degree.
    """

    seconds: FloatArray
    least: FloatArray
    ends: FloatArray
    areas: FloatArray


@kernel
def _wave_tables(count: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make the tables; durations within `_GRID` are merged: seconds of the shortest, areas of the longest."""
    outlasting = 0.0
    for i in range(len(sequences.work)):
        outlasting = max(outlasting, sequences.attention[i] / sequences.tokens[i])
    ends = np.full((count, inputs.num_ranks + 1), np.inf)
    areas = np.full((count, inputs.num_ranks + 1), np.inf)
    for i in range(count):
        for degree in range(least_degree(i, sequences, inputs), inputs.num_ranks + 1):
            ends[i, degree] = alone_at_best(i, degree, sequences, inputs)
            areas[i, degree] = _area_on(i, degree, outlasting, sequences, inputs)
    most = ends.size + _LONGER
    seconds, least = np.zeros(most), np.full((count, most), np.inf)
    k = -1
    # By rising end. Degrees that do not fit come last, at infinity.
    for at in falling_order(-ends.ravel()):
        i, degree = at // (inputs.num_ranks + 1), at % (inputs.num_ranks + 1)
        if ends[i, degree] == np.inf:
            break
        if k >= 0 and areas[i, degree] >= least[i, k]:
            continue  # a wider ring has no smaller area
        if k < 0 or ends[i, degree] > seconds[k] * _DURATION_GRID:
            k += 1
            seconds[k] = ends[i, degree]
            # A longer wave still admits all degrees of a shorter one.
            for row in range(count):  # numba's assignment of slices takes 2 s to compile
                least[row, k] = least[row, max(0, k - 1)]
        least[i, k] = areas[i, degree]
    for _longer in range(_LONGER):
        k += 1
        seconds[k] = seconds[k - 1] * _STRETCH
        for row in range(count):
            least[row, k] = least[row, k - 1]
    return WaveTables(seconds[: k + 1].copy(), least[:, : k + 1].copy(), ends, areas)


@inlined
def _area_on(i: int, degree: int, outlasting: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds of a sequence on this degree, or on the next multiple of a Ulysses degree."""
    least = np.inf
    if degree == 1 or not inputs.splits.only:
        least, _hidden = ring_area(i, degree, degree, outlasting, sequences, inputs)
    for k in range(len(inputs.splits.heads) if degree > 1 else 0):
        sets = (degree + inputs.splits.heads[k] - 1) // inputs.splits.heads[k]
        if sets == 1 or not inputs.splits.only:
            area, _hidden = ring_area(i, degree, sets, outlasting, sequences, inputs)
            least = min(least, area + exchange_seconds(k, inputs) * sequences.tokens[i])
    return float(least)


class PricedTokens(NamedTuple):
    """Waits in a wave, if every token of the other sequences has the same price.

    m is the time that a rank without dealt sequences waits for the end of the wave; it is negative if the wave ends
    before its budget is used. m+ = max(0, m). A pack of d ranks saves the wave d m+.

    Attributes:
        price: most seconds of work per token of the others.
        idle: [durations + 1] m.
        alone: [dealt, durations, 2] least A - d m+ of each sequence, at m and at the next m.
    """

    price: float
    idle: FloatArray
    alone: FloatArray


@kernel
def _with_price(price: float, tables: WaveTables, inputs: PlannerInputs) -> Any:
    """Return the waits at this price of a token."""
    seconds, ends = tables.seconds, tables.ends
    idle = np.full(len(seconds) + 1, np.inf)
    for k in range(len(seconds)):
        idle[k] = max(seconds[k], inputs.floor) - inputs.prices.beta - price * inputs.tokens_per_rank
    alone = np.full((len(ends), len(seconds), 2), np.inf)
    for i in range(len(ends)):
        for k in range(len(seconds)):
            for side in range(2):
                # `idle` is infinite beyond the last duration, whose second side is never read.
                waits = max(0.0, idle[k + side])
                for degree in range(1, inputs.num_ranks + 1):
                    # A duration stands for the interval up to the next, so all that end before that may be in time.
                    if k + 1 == len(seconds) or ends[i, degree] < seconds[k + 1]:
                        alone[i, k, side] = min(alone[i, k, side], tables.areas[i, degree] - degree * waits)
    return PricedTokens(price, idle, alone)


@kernel
def _waves_with_others(
    count: int, tables: WaveTables, priced: PricedTokens, sequences: Sequences, inputs: PlannerInputs
) -> FloatArray:
    """Return [2^count] the least seconds that a wave with each mask's sequences adds to the makespan, without beta.

    Let the wave last T and hold x tokens of dealt sequences, each with area A(d) on d ranks. Let other sequences do y
    work in it, at most `price` per token: work above that price counts as free (see `dealt_with_others`). Work not
    done in this wave is done elsewhere, at best evenly, so the wave adds T - beta - y / N. A pack of d ranks has
    y <= d (T - beta) - sum of A, and y <= price (d E - x). A rank outside has y <= min(T - beta, price E), so it waits
    at least m = T - beta - price E. Hence N times the added seconds is at least each of: sum of A; N m + price x; and
    N m+ + sum of min over d of (A(d) - d m+), with m+ = max(0, m). The second grows with T. The third is concave in T,
    so its minimum up to the next duration is at either end.
    """
    ranks, last = inputs.num_ranks, len(tables.seconds) - 1
    price, idle, alone = priced.price, priced.idle, priced.alone
    adds, tokens = np.full(1 << count, np.inf), np.zeros(1 << count)
    held, kept = np.zeros((1 << count, last + 1)), np.zeros((1 << count, last + 1, 2))
    for mask in range(1, 1 << count):
        # Masks rise, so the sums without the lowest member are known.
        rest, i = mask & (mask - 1), 0
        while not mask >> i & 1:
            i += 1
        tokens[mask] = tokens[rest] + sequences.tokens[i]
        for k in range(last + 1):
            held[mask, k] = held[rest, k] + tables.least[i, k]
            # Infinite if a member does not end in time.
            if held[mask, k] == np.inf or tokens[mask] > ranks * inputs.tokens_per_rank:
                continue
            least = max(held[mask, k], ranks * idle[k] + price * tokens[mask])
            # The last duration stands for all longer ones, so only terms that never fall with T count.
            if k < last:
                beside = np.inf
                for side in range(2):
                    kept[mask, k, side] = kept[rest, k, side] + alone[i, k, side]
                    beside = min(beside, ranks * max(0.0, idle[k + side]) + kept[mask, k, side])
                least = max(least, beside)
            adds[mask] = min(adds[mask], least / ranks)
    return adds
