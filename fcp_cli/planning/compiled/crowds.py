"""Lower bounds of waves from the heaviest sequences taken together, a crowd; notation as in `certificate`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel
from fcp_cli.planning.compiled.alone import alone_at_best, at_best, traffic_seconds, work_in_rings
from fcp_cli.planning.compiled.certificate import (
    densities,
    exchange_seconds,
    first_not_below,
    other_waves,
    wave_bound,
)
from fcp_cli.planning.compiled.core import Load, PlannerInputs, Sequences, falling_order, pack_seconds, total_of

_NARROWINGS = 4  # bisection steps for the largest refuted makespan
_GRID = 1.003  # ratio of consecutive wave durations tried; the bound loses no more than this
_MARGIN = 1e-9  # relative; keeps rounding on the safe side


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
def _make_crowd(count: int, by_density: IntArray, thin: float, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make the crowd of the `count` heaviest sequences."""
    others = len(by_density) - count
    held_tokens, held_work = np.zeros(others + 1), np.zeros(others + 1)
    k = 0
    for i in by_density:
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
        thin,
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
    density, thin = densities(sequences)
    by_density = falling_order(density)
    # Sequence 0 is in every crowd, so one of its waves lasts at least this long.
    longest = np.inf
    for degree in range(
        (sequences.tokens[0] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank, inputs.num_ranks + 1
    ):
        longest = min(longest, alone_at_best(0, degree, sequences, inputs))
    best, count = at_least, 2
    while count <= n:
        crowd = _make_crowd(count, by_density, thin, sequences, inputs)
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


@kernel
def waves_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
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
