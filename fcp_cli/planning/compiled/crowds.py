"""Lower bounds of waves seen from the sequences with the most work together; notation of `certificate`."""

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

_NARROWINGS = 4  # of the interval in which a makespan that the waves' bounds refute is sought
_GRID = 1.003  # ratio of the lengths of a wave that are tried; the bound loses no more than that
_MARGIN = 1e-9  # relative; keeps rounding on the safe side


class Crowd(NamedTuple):
    """The sequences with the most work, which may all lie in one wave or not, and the others.

    Attributes:
        members: how many.
        work, tokens: the work and tokens of the crowd, summed.
        least: lower bound of each load of the crowd's sequences.
        densest: greatest w / t of any other sequence.
        held_tokens, held_work: [others + 1] the others by falling density, summed from the densest on, from 0.
        thin: least l / t of any sequence, crowd or not.
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
    """Make a crowd of the `count` sequences with the most work; the others are len(by_density) - count >= 0."""
    others = len(by_density) - count
    held_tokens, held_work = np.zeros(others + 1), np.zeros(others + 1)
    k = 0
    for i in by_density:
        # By falling work the crowd are the first `count`; by density they are anywhere.
        if i >= count:
            held_tokens[k + 1] = held_tokens[k] + sequences.tokens[i]
            held_work[k + 1] = held_work[k] + sequences.work[i]
            k += 1
    return Crowd(
        count,
        total_of(sequences.work[:count]),
        float(total_of(sequences.tokens[:count])),
        _least_load(count, sequences, inputs),
        # The others fall in density, so the first is the densest.
        held_work[1] / held_tokens[1] if others else 0.0,
        held_tokens,
        held_work,
        thin,
    )


@kernel
def _least_load(count: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the least of the first `count` sequences in every respect; the more tokens the shortest has, the less."""
    # `shortest` is that of the longest: a halo takes the fewest messages there.
    attention, linear = sequences.attention[0], sequences.linear[0]
    fewest, most = sequences.tokens[0], sequences.tokens[0]
    for i in range(1, count):
        attention, linear = min(attention, sequences.attention[i]), min(linear, sequences.linear[i])
        fewest, most = min(fewest, sequences.tokens[i]), max(most, sequences.tokens[i])
    return Load(attention, linear, fewest, min(fewest, 2 * inputs.prices.reach), most)


@kernel
def _least_member(degree: int, crowd: Crowd, inputs: PlannerInputs) -> float:
    """Return the least seconds of a pack of this degree with one of the crowd, or more; infinite over the budget."""
    if degree * inputs.tokens_per_rank < crowd.least.tokens:
        return np.inf
    return pack_seconds(crowd.least, degree, at_best(degree, inputs), inputs)


@kernel
def _most_done(makespan: float, crowd: Crowd, inputs: PlannerInputs) -> float:
    """Return the most work of a wave that holds the whole crowd and ends by `makespan`; -1 if none can.

    A pack of degree d ends in time only with at most t(d) = min(d E, d (makespan - beta - hops) / (thin + c_d (d - 1)))
    tokens, since its linear seconds and its ring's follow each other. With some of the crowd in it, M, it does at most
    sum over M (w - densest t) + densest t(d) work. It has a degree that ends in time with the least member of the
    crowd, and holds at most floor(max t(d) / least t) of the crowd, so there are at least P such packs and at most as
    many as members. The other ranks do at most S(their tokens), S the work of the densest others, a concave function:
    S(x) <= S(x0) + S'(x0) (x - x0) for x <= x0, the tokens that P packs leave (S' from the left). So every pack with
    some of the crowd adds at most densest t(d) to the work and takes S'(x0) d E of it; its best degree bounds the sum.
    No wave does more than N (makespan - beta).
    """
    num_ranks, tokens_per_rank = inputs.num_ranks, inputs.tokens_per_rank
    narrowest, most_tokens = 0, 0.0
    for degree in range(1, num_ranks + 1):
        if narrowest == 0 and _least_member(degree, crowd, inputs) <= makespan:
            narrowest = degree
        if narrowest:
            most_tokens = max(most_tokens, _most_tokens(degree, makespan, crowd.thin, inputs))
    # Rounded up by the margin: one member too many in a pack only weakens the bound.
    together = int(most_tokens / crowd.least.tokens * (1.0 + _MARGIN))
    if narrowest == 0 or together == 0:
        return -1.0
    packs = (crowd.members + together - 1) // together
    # The crowd's packs need more ranks by themselves than there are: not in one wave.
    if packs * narrowest > num_ranks:
        return -1.0
    room = float((num_ranks - packs * narrowest) * tokens_per_rank)
    k = first_not_below(room, crowd.held_tokens)
    slope, held = 0.0, crowd.held_work[k]
    # x0 lies within the k-th of the others, of which a part counts. Behind the last one the slope is 0.
    if k and crowd.held_tokens[k] >= room:
        slope = (crowd.held_work[k] - crowd.held_work[k - 1]) / (crowd.held_tokens[k] - crowd.held_tokens[k - 1])
        held -= slope * (crowd.held_tokens[k] - room)
    # Negative if each pack takes more work from the other ranks than it adds.
    best = -np.inf
    for degree in range(narrowest, num_ranks + 1):
        if _least_member(degree, crowd, inputs) <= makespan:
            # Not all behind the narrowest end in time: seconds jump up where groups begin to cross nodes.
            tokens = _most_tokens(degree, makespan, crowd.thin, inputs)
            best = max(best, crowd.densest * tokens - slope * degree * tokens_per_rank)
    done = crowd.work - crowd.densest * crowd.tokens + held + slope * packs * narrowest * tokens_per_rank
    # A gain is taken by as many packs as there can be, a loss by as few as there must be.
    done += best * (crowd.members if best > 0.0 else packs)
    return float(min(done, num_ranks * (makespan - inputs.prices.beta)))


@inlined
def _most_tokens(degree: int, makespan: float, thin: float, inputs: PlannerInputs) -> float:
    """Return t(d) of `_most_done`: the tokens that a pack of this degree can hold and end in time."""
    most = 0.0
    for k in range(-1, len(inputs.splits.heads) if degree > 1 else 0):
        sets, exchange = degree, 0.0
        if k >= 0:
            # Sets fill the group.
            if degree % inputs.splits.heads[k]:
                continue
            sets, exchange = degree // inputs.splits.heads[k], exchange_seconds(k, inputs)
        per_token = thin + traffic_seconds(degree, sets, inputs) + exchange
        held = float(degree * inputs.tokens_per_rank)
        if per_token > 0.0:
            held = min(held, degree * (makespan - inputs.prices.beta - inputs.prices.hop * (sets - 1)) / per_token)
        # The most of all ways to split heads: a bound may not know which one a pack takes.
        most = max(most, held)
    return most


@kernel
def crowd_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least makespan under waves, seen from the sequences with most work; `at_least` if that is no better.

    Take the `count` sequences with the most work. Either two waves hold some of them: these last at least as long as
    the longest sequence and as the least of them. Or one wave holds them all: it lasts tau, at least as long as the
    longest sequence, does at most `_most_done` work, a function that grows with tau, and other waves do the rest. tau
    lies in one of the steps of a grid; over each step the wave lasts at least its lower end and does at most the work
    that its upper end allows. Any count gives a bound; doubling counts are tried.
    """
    n = len(sequences.work)
    total, tokens = total_of(sequences.work), total_of(sequences.tokens)
    more_waves = (tokens - 1) // (inputs.num_ranks * inputs.tokens_per_rank)
    density, thin = densities(sequences)
    by_density = falling_order(density)
    # Sequence 0 is in every crowd: one wave of the crowd lasts for its best time at least.
    longest = np.inf
    for degree in range(
        (sequences.tokens[0] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank, inputs.num_ranks + 1
    ):
        longest = min(longest, alone_at_best(0, degree, sequences, inputs))
    best, count = at_least, 2
    while count <= n:
        crowd = _make_crowd(count, by_density, thin, sequences, inputs)
        # Any count gives a valid bound; doubling takes log n passes.
        count *= 2
        shortest = np.inf
        for degree in range(1, inputs.num_ranks + 1):
            shortest = min(shortest, _least_member(degree, crowd, inputs))
        # Two waves hold the crowd, so one further wave less is still to come.
        bound = longest + shortest + inputs.prices.beta * max(0, more_waves - 1)
        if bound <= best:
            break  # more sequences are only shorter
        makespan = longest
        # A single wave as long as two cannot lower the least of both cases any more.
        while bound > best and makespan + inputs.prices.beta * more_waves < bound:
            step_end = makespan * _GRID
            done = _most_done(step_end, crowd, inputs)
            if done >= 0.0:
                rest = total - done
                # Work that is left takes a wave, even if the tokens would fit into this one.
                waves = max(more_waves, 1 if rest > _MARGIN * total else 0)
                bound = min(bound, makespan + inputs.prices.beta * waves + max(0.0, rest) / inputs.num_ranks)
            makespan = step_end
        best = max(best, bound * (1.0 - _MARGIN))
    return float(best)


@kernel
def waves_bound(at_least: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the largest of `wave_bound` and `crowd_bound`, both with work in rings; `at_least` if they are no better.

    In a schedule that ends before B no wave outlasts B - `other_waves`, so that each sequence has a ring no narrower
    than it takes to end by then. If the bounds with that work are B or more, there is no such schedule. Both fall with
    B: the largest such B lies between the bound without a limit and the bound at that bound.
    """
    others = other_waves(sequences, inputs)
    refuted = _bound_of_waves(np.inf, at_least, sequences, inputs)
    # Heads that are split leave no ring certain: no limit changes anything.
    high = refuted if len(inputs.splits.heads) else _bound_of_waves(refuted - others, refuted, sequences, inputs)
    makespan = high
    # The upper end first, which often holds and ends the loop; then the middle of what is left.
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
    # In the order of plain work, not of work in rings: any crowd, and any sequence's wave, gives a bound.
    ringed = Sequences(
        sequences.attention, sequences.linear, work_in_rings(longest_wave, sequences, inputs), sequences.tokens
    )
    return float(crowd_bound(max(at_least, wave_bound(ringed, inputs)), ringed, inputs))
