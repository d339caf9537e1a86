"""Lower bounds that account for rings and waves, each proven in the docstring of its function.

`area_bound` holds under either sync, `wave_bound` under waves. Both, and `wave_bounds`, build on the least seconds of a
single sequence on a group by itself, at the best placement (`alone_at_best`), and on the traffic of a ring.

Notation: N ranks with a budget of E tokens. Sequence s has attention seconds a, linear seconds l, work w = a + l and t
tokens on one rank; its density is w / t. beta is the fixed cost of a micro-batch. A group of degree d takes c_d seconds
of ring traffic per token and hop, and h more per hop; c_d is the price inside a node if d <= ranks per node (or
across nodes, if that is faster), else across nodes. Attention hides at most a share 1 - e of its ring. Sliding-window
attention with halo exchange is part of l. Its halos cost y_d seconds per halo token and further set, in at least two
messages of z seconds each. T(s, d) is the time of s alone on degree d, at least its host's. A pack takes at least
T(s, d) for each of its sequences, since no term of the cost model falls when a sequence is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.core import (
    UNPLACED,
    PlannerInputs,
    Sequences,
    falling_order,
    faster_tier,
    group_terms,
    is_way,
    least_degree,
    most_of,
    pack_seconds,
    recomputation_seconds,
    seconds_by,
    sequence_load,
    total_of,
    way_terms,
)
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf

_STEPS = 24  # of bisection: 2^-24 of the interval is finer than any displayed gap, and the bound holds after every step
_LONGEST = 4  # heaviest sequences whose wave is bounded; each gives a valid bound, lighter ones give weaker ones
_MARGIN = 1e-9  # relative; keeps rounding on the safe side


@kernel
def area_bound(simple: float, waves: bool, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the makespan below which the least areas (rank-seconds) of all micro-batches exceed N ranks.

    If a schedule of makespan T exists, every micro-batch ends within T, so each sequence takes at least its least area
    for T (`_least_area`, which falls with T). Under waves it ends within T - `other_waves`, which replaces T there. In
    addition, each rank pays beta per micro-batch: on average for at least `_microbatches` of them and at least one (an
    idle rank wastes T >= beta), under waves for at least ceil(tokens / (N E)). With recomputation S(h) of h tokens on a
    rank, beta + S(h) is at least p h, with p its least value per token, attained at `shared_tokens`; what it exceeds
    p h by is in the areas. All areas / N plus these fixed seconds must be <= T. Bisection finds the largest refuted T.
    """
    n = len(sequences.work)
    tokens = total_of(sequences.tokens) / inputs.num_ranks  # mean per rank
    outlasting, linear_per_token = 0.0, np.inf
    least_tokens = inputs.shared_tokens
    per_token = (inputs.prices.beta + recomputation_seconds(least_tokens, 1, inputs.prices)) / least_tokens
    for i in range(n):
        outlasting = max(outlasting, sequences.attention[i] / sequences.tokens[i])
        linear_per_token = min(linear_per_token, sequences.linear[i] / sequences.tokens[i])
    refuted, held = simple * (1.0 - _MARGIN), np.inf
    others = other_waves(sequences, inputs) if waves else 0.0
    for _step in range(_STEPS):
        # Test the simple bound first: if it is not refuted, one pass suffices.
        makespan = simple * (1.0 + _MARGIN) if _step == 0 else 0.5 * (refuted + held)
        # Without an upper end yet, grow by a quarter until a makespan is not refuted.
        if held == np.inf and _step:
            makespan = refuted * 1.25
        total, longest = 0.0, makespan - others
        for i in range(n):
            # If the sequence ends in time on a single rank, without extra recomputation, its least area is its work.
            if inputs.prices.beta + sequences.work[i] <= longest and sequences.tokens[i] <= least_tokens:
                total += sequences.work[i]
            else:
                total += _least_area(i, longest, outlasting, per_token, sequences, inputs)
        count = _microbatches(makespan, tokens, linear_per_token, inputs)
        # The margin: rounding must not add a wave to a step that fills its waves exactly.
        count = max(1.0, np.ceil(tokens / inputs.tokens_per_rank - _MARGIN) if waves else count)
        fixed = max(inputs.prices.beta * count, tokens * per_token)
        if total / inputs.num_ranks + fixed <= makespan:
            held = makespan
            if _step == 0:
                break
        else:
            refuted = makespan
    return float(refuted)


@kernel
def _microbatches(makespan: float, tokens: float, linear_per_token: float, inputs: PlannerInputs) -> float:
    """Return the least mean number of micro-batches per rank that hold `tokens` per rank; infinite if none can.

    A rank that runs m micro-batches holds at most m E tokens in them. It works for at most makespan - m beta seconds,
    so it also holds at most (makespan - m beta) / min(l / t) tokens. The mean (m, tokens) over all ranks lies in the
    convex hull of these points.
    """
    # Nothing takes time, so any number of micro-batches fits.
    if inputs.prices.beta + linear_per_token == 0.0:
        return tokens / inputs.tokens_per_rank
    # Full micro-batches that end in time: up to their tokens, the hull is the line of full ones.
    whole = np.floor(makespan / (inputs.prices.beta + inputs.tokens_per_rank * linear_per_token))
    if tokens <= whole * inputs.tokens_per_rank:
        return tokens / inputs.tokens_per_rank
    low = whole * inputs.tokens_per_rank
    high = (makespan - (whole + 1.0) * inputs.prices.beta) / linear_per_token if linear_per_token > 0.0 else np.inf
    high = min(high, (whole + 1.0) * inputs.tokens_per_rank)
    # Not even whole + 1 micro-batches hold so many tokens in time.
    if tokens > high:
        return np.inf
    return float(whole + (tokens - low) / (high - low))


@kernel
def _least_area(
    i: int, makespan: float, outlasting: float, per_token: float, sequences: Sequences, inputs: PlannerInputs
) -> float:
    """Return the least rank-seconds, without fixed ones, of sequence i if its micro-batch must end within `makespan`.

    A pack of degree d takes its ranks sum l + max(sum (a + k (d - 1) t), (1 - e) x) + e x + sum g_d t + h' d
    rank-seconds. k is the extra attention time per token and hop, x = sum (c_d (d - 1) - g_d) t + h (d - 1) d is the
    ring without its last hop, which takes g_d seconds per token and h' fixed. The pack holds at most d E
    tokens, so each token bears at least 1 / E of the terms in h d and h' d. Let outlasting = max over sequences of
    a / t. If (1 - e) (c_d (d - 1) - g_d) >= outlasting + k (d - 1), the hideable part of the ring outlasts attention in
    every pack, which then takes at least sum (l + c_d (d - 1) t) and the hops. Otherwise it takes at least
    sum (w + k (d - 1) t) and the exposed part. All of this grows with d. Halos add y_d (d - 1) per halo token, and two
    messages, of which each token bears 2 z / E.

    With Ulysses degree u, the same holds for the ring of ceil(d / u) sets, whose members move at least as much per
    token and hop. In addition every token is exchanged, for x_u rank-seconds. To both, `_recomputed` is added, which
    falls with d: once it is 0, wider degrees only have more traffic.
    """
    least, tokens = np.inf, sequences.tokens[i]
    for degree in range(least_degree(i, sequences, inputs), inputs.num_ranks + 1):
        # No schedule of this makespan runs the sequence on a degree that ends too late.
        if alone_at_best(i, degree, sequences, inputs) > makespan:
            continue
        again, is_last = _recomputed(tokens, degree, per_token, inputs), inputs.splits.only == 1
        # Pure Ulysses groups have no ring.
        if degree == 1 or not inputs.splits.only:
            area, hidden = ring_area(i, degree, degree, outlasting, sequences, inputs)
            least = min(least, area + again)
            is_last = hidden or inputs.prices.ring[1] >= inputs.prices.ring[0]
        for k in range(len(inputs.splits.heads) if degree > 1 else 0):
            sets = (degree + inputs.splits.heads[k] - 1) // inputs.splits.heads[k]
            if sets == 1 or not inputs.splits.only:
                area, _hidden = ring_area(i, degree, sets, outlasting, sequences, inputs)
                least = min(least, area + exchange_seconds(k, inputs) * tokens + again)
        if is_last and again == 0.0:
            break
    return float(least)


@inlined
def _recomputed(tokens: int, degree: int, per_token: float, inputs: PlannerInputs) -> float:
    """Return the rank-seconds by which a sequence's recomputation exceeds `per_token`, p; proven for `area_bound`.

    Let G(h) = beta + S(h) - p h: convex, and 0 at h* = `shared_tokens`. A pack of h tokens per rank pays its d ranks
    d (p h + G(h)) and holds tokens of several sequences, h_i per rank each. Those with h_i > h* have sum G(h_i) <=
    G(sum h_i) <= G(h): with h_i = h* + x_i, G(h* + x) is 0 at x = 0 and convex, thus superadditive, and it rises.
    """
    held = tokens / degree
    if held <= inputs.shared_tokens:
        return 0.0
    again = inputs.prices.beta + recomputation_seconds(held, 1, inputs.prices) - per_token * held
    return float(max(0.0, degree * again))


@inlined
def ring_area(i: int, degree: int, sets: int, outlasting: float, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the least rank-seconds of sequence i in packs of this degree whose ring has `sets` sets.

    Also return whether attention may hide the hideable part of the ring.
    """
    # A single set has no ring; the caller adds its all-to-all.
    if sets == 1:
        return sequences.work[i], True
    tokens, home = sequences.tokens[i], home_seconds(degree, inputs)
    traffic = traffic_seconds(degree, sets, inputs) - home
    prices = inputs.prices
    longer = prices.chunk * (sets - 1)
    messages = prices.home_hop * tokens / inputs.tokens_per_rank
    hops = prices.hop * (sets - 1) * tokens / inputs.tokens_per_rank
    if prices.reach:
        messages += least_of_tiers(prices.halo, degree, inputs) * (sets - 1) * min(tokens, 2 * prices.reach)
        messages += 2.0 * prices.halo_message * tokens / inputs.tokens_per_rank
    # The case depends on the degree only, not on the sequence: a pack is all in one case or all in the other.
    if (1.0 - prices.exposed) * traffic < outlasting + longer:
        beside = prices.exposed * hops + messages
        return sequences.work[i] + (longer + prices.exposed * traffic + home) * tokens + beside, True
    return sequences.linear[i] + (traffic + home) * tokens + hops + messages, False


@inlined
def exchange_seconds(k: int, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds per token of the all-to-all in sets of the k-th Ulysses degree."""
    heads = inputs.splits.heads[k]
    # `exchange` is in seconds of each rank per token of the pack: times `heads` for all ranks of the set.
    inside = group_terms(heads, heads, 0, 0, inputs.prices).exchange
    across = group_terms(heads, heads, 0, 1, inputs.prices).exchange
    return float(heads * min(inside, across))


@kernel
def wave_bound(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the largest of `_wave_of` over the `_LONGEST` heaviest sequences."""
    n = len(sequences.work)
    tokens, density = total_of(sequences.tokens), densities(sequences)
    further_beta = inputs.prices.beta * max(0, (tokens - 1) // (inputs.num_ranks * inputs.tokens_per_rank))
    best = 0.0
    for j in range(min(_LONGEST, n)):
        # Equal work gives an equal bound.
        if j and sequences.work[j] == sequences.work[j - 1]:
            continue
        best = max(best, _wave_of(j, further_beta, density, sequences, inputs))
    return float(best * (1.0 - _MARGIN))


@kernel
def _wave_of(j: int, further_beta: float, density: Densities, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return a lower bound of the makespan under waves, from the wave that runs j: the least over all degrees d of j.

    Let that wave last tau = T(j, d) + delta. Apart from j it does at most Y + X work. Y is the work on the N - d other
    ranks: at most (N - d)(tau - beta), and at most that of the densest (N - d) E tokens without j. X is the work of
    further sequences in j's own pack. If attention hides the hideable part of j's ring, X <= d delta. Otherwise they
    add x tokens with (c_d (d - 1) + thin) x <= d delta and X <= dense x, where thin and dense are the least l / t and
    the greatest w / t of any sequence. With Ulysses degree u, T and c are those of a ring of d / u sets, and the x
    tokens are exchanged as well. The other waves do the rest of the work in at least rest / N seconds and pay beta
    each; any rest takes at least one wave. While there is a rest, the sum is convex and piecewise linear in delta: the
    minimum is at delta = 0, where Y stops growing, or where no rest is left. If X could grow by more than N per second,
    only T(j, d) and the beta of the other waves count. If X <= d delta, Y + X grows by at most N per second, so no
    delta lowers delta + rest / N: with recomputation, Y at delta = 0 is that of `_most_beside`.
    """
    num_ranks, beta, total = inputs.num_ranks, inputs.prices.beta, total_of(sequences.work)
    recomputes = recomputation_seconds(float(inputs.tokens_per_rank), 1, inputs.prices) > 0.0
    without_j, held_tokens, held_work = _held_without(j, density.falling, sequences)
    least = np.inf
    for degree in range(least_degree(j, sequences, inputs), num_ranks + 1):
        # This degree cannot lower the minimum.
        if alone_at_best(j, degree, sequences, inputs) + further_beta >= least:
            continue
        others = num_ranks - degree
        # Without j, which its own pack counts.
        held = _densest(float(others * inputs.tokens_per_rank), without_j, held_tokens, held_work, sequences)
        for k in range(-1, len(inputs.splits.heads) if degree > 1 else 0):
            shortest, growth = _growth(k, j, degree, density, sequences, inputs)
            if shortest + further_beta >= least:
                continue
            # Every second of delta then gains more than it costs, so only terms without delta bound.
            if growth > num_ranks:
                least = min(least, shortest + further_beta)
                continue
            grown = sequences.work[j] + others * (shortest - beta)
            # From this delta on, the wave does all work under both limits of Y.
            enough = max(0.0, (total - grown) / (growth + others), (total - sequences.work[j] - held) / growth)
            value = shortest + further_beta + enough
            # Below it, the sum is least at one of these two corners.
            for delta in (0.0, held / others - (shortest - beta) if others else 0.0):
                if 0.0 <= delta < enough:
                    done = min(grown + (growth + others) * delta, sequences.work[j] + growth * delta + held)
                    # Remaining work takes a wave, even if all tokens would fit into this one.
                    further = max(further_beta, beta) + (total - done) / num_ranks
                    value = min(value, shortest + delta + further)
            if recomputes and growth <= degree:  # a second of delta then gains no more than it costs
                done = sequences.work[j] + _most_beside(
                    others, shortest, held, without_j, held_tokens, held_work, sequences, inputs
                )
                value = max(value, shortest + further_beta + max(0.0, total - done) / num_ranks)
            least = min(least, value)
    return float(least)


@kernel
def _most_beside(
    ranks: int,
    seconds: float,
    most: float,
    others: IntArray,
    held_tokens: FloatArray,
    held_work: FloatArray,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> float:
    """Return the most work that `ranks` ranks do in a wave of `seconds`: Y of `_wave_of`, at most `most`.

    With h tokens a rank on average they recompute for at least S(h) seconds a rank, since S is convex, and do at most
    the work of the densest ranks x h tokens. The first limit falls with h, the second rises. Where the second is lower,
    at h0, the first at h0 bounds both sides of h0: less is done with fewer tokens, and with more. Bisection raises h0.
    """
    free, low, high = seconds - inputs.prices.beta, 0.0, float(inputs.tokens_per_rank)
    for _step in range(_STEPS):
        held = 0.5 * (low + high)
        limit = ranks * (free - recomputation_seconds(held, 1, inputs.prices))
        if _densest(ranks * held, others, held_tokens, held_work, sequences) <= limit:
            low = held
        else:
            high = held
    return float(min(most, ranks * (free - recomputation_seconds(low, 1, inputs.prices))))


@kernel
def _growth(k: int, j: int, degree: int, density: Densities, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return T(j, d) with the k-th Ulysses degree (-1: a ring), and the most work j's pack gains per further second.

    T(j, d) is the device's: a pack that waits for its host gains work for nothing.
    """
    load = sequence_load(j, sequences, inputs)
    if degree == 1:
        again = recomputation_seconds(load.tokens, 1, inputs.prices)
        return inputs.prices.beta + load.linear + load.attention + again, 1.0
    across, sets, exchange = at_best(degree, inputs), degree, 0.0
    shortest = np.inf
    if is_way(k, degree, across, inputs):
        shortest = seconds_by(way_terms(k, degree, across, inputs), load, degree, inputs)
    if k >= 0:
        sets, exchange = degree // inputs.splits.heads[k], exchange_seconds(k, inputs)
    traffic = traffic_seconds(degree, sets, inputs)
    hidden = traffic - home_seconds(degree, inputs)
    # Sets wider than the number of key-value heads replicate them, which multiplies the traffic.
    copies = max(1.0, inputs.splits.heads[k] / inputs.prices.key_value_heads) if k >= 0 else 1.0
    hides = sets <= 1 or load.attention >= (1.0 - inputs.prices.exposed) * (
        hidden * copies * load.tokens + inputs.prices.hop * (sets - 1) * degree
    )
    growth = 1.0 * degree
    if not hides:
        growth = max(growth, density.dense * degree / (traffic + exchange + density.thin))
    return shortest, growth


@kernel
def _held_without(skipped: int, by_density: IntArray, sequences: Sequences) -> Any:
    """Return [sequences] all sequences but one by falling density, and the prefix sums of their tokens and work."""
    n, k = len(by_density), 0
    others, tokens, work = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
    for i in by_density:
        # Entry k of both sums covers the first k others.
        if i != skipped:
            others[k] = i
            k += 1
            tokens[k] = tokens[k - 1] + sequences.tokens[i]
            work[k] = work[k - 1] + sequences.work[i]
    return others, tokens, work


@leaf
def _densest(
    tokens: float, others: IntArray, held_tokens: FloatArray, held_work: FloatArray, sequences: Sequences
) -> float:
    """Return the most work in `tokens` tokens of the others, in fractions of sequences; see `_held_without`."""
    k = first_not_below(tokens, held_tokens)
    if k == 0 or held_tokens[k] < tokens:
        return float(held_work[k])
    # A fraction of the last sequence.
    i = others[k - 1]
    return float(held_work[k - 1] + sequences.work[i] * (tokens - held_tokens[k - 1]) / sequences.tokens[i])


@leaf
def first_not_below(value: float, rising: FloatArray) -> int:
    """Return the position of the first of rising values that is at least `value`, or the last position."""
    low, high = 0, len(rising) - 1
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def other_waves(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least total seconds of all waves except any single one.

    No wave does more than the work of the densest N E tokens. The other waves do the rest, at best evenly. There are at
    least ceil(tokens / (N E)) - 1 of them, and each pays beta and lasts at least the floor.
    """
    room = inputs.num_ranks * inputs.tokens_per_rank
    # ceil(tokens / room) - 1 in integers.
    count = max(0, (total_of(sequences.tokens) - 1) // room)
    # The excepted wave takes the densest tokens: that leaves the least work.
    left = total_of(sequences.work)
    for i in densities(sequences).falling:
        taken = min(room, sequences.tokens[i])
        left -= sequences.work[i] * taken / sequences.tokens[i]
        room -= taken
        if room == 0:
            break
    # The margin: rounding may leave a little work where none is left.
    seconds = (1.0 - _MARGIN) * max(0.0, left) / inputs.num_ranks + inputs.prices.beta * count
    return float(max(seconds, inputs.floor * count))


class Densities(NamedTuple):
    """Work per token of the sequences of a step.

    Attributes:
        falling: [sequences] positions of the sequences by falling density.
        dense: greatest w / t of any sequence.
        thin: least l / t of any sequence.
    """

    falling: IntArray
    dense: float
    thin: float


@kernel
def densities(sequences: Sequences) -> Any:
    """Return the densities of the sequences."""
    density, thin = np.empty(len(sequences.work)), np.inf
    for i in range(len(density)):
        density[i] = sequences.work[i] / sequences.tokens[i]
        thin = min(thin, sequences.linear[i] / sequences.tokens[i])
    return Densities(falling_order(density), most_of(density), thin)


@inlined
def alone_at_best(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of sequence i alone on a group of this degree, at the best placement, without ring padding."""
    return pack_seconds(sequence_load(i, sequences, inputs), degree, at_best(degree, inputs), inputs)


@inlined
def at_best(degree: int, inputs: PlannerInputs) -> int:
    """Return the cheapest `across` of a group of this degree, which bounds every placement from below."""
    # A group that fits into a node is cheapest inside it, unless bytes travel faster across nodes.
    return UNPLACED if degree > inputs.ranks_per_node or faster_tier(inputs) else 0


@kernel
def alone_by_degree(i: int, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [num_ranks + 1] the least seconds of sequence i alone on each degree; infinite if it does not fit."""
    seconds = np.full(inputs.num_ranks + 1, np.inf)
    for degree in range(least_degree(i, sequences, inputs), inputs.num_ranks + 1):
        seconds[degree] = alone_at_best(i, degree, sequences, inputs)
    return seconds


@kernel
def least_alone(members: IntArray, speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [members] the seconds of each sequence alone on its fastest degree.

    Args:
        members: positions in `sequences`.
        speeds: [num_ranks] rank speeds, fastest first; a group is as fast as its slowest rank.
        sequences: the sequences.
        inputs: the ranks and their prices.
    """
    least = np.full(len(members), np.inf)
    for k in range(len(members)):
        least[k] = _least(members[k], 0.0, speeds, sequences, inputs)
    return least


@kernel
def longest_alone(speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the maximum of `least_alone` over all sequences."""
    longest, heaviest = 0.0, int(np.argmax(sequences.work))
    for k in range(-1, len(sequences.tokens)):
        # Start with the heaviest: most sequences have no more of anything, take no longer, and are skipped.
        i = heaviest if k < 0 else k
        if k < 0 or not _is_within(i, heaviest, sequences, inputs):
            # A sequence only matters if it takes more than `longest`, so its search may stop there.
            longest = max(longest, _least(i, longest, speeds, sequences, inputs))
    return longest


@inlined
def _is_within(i: int, other: int, sequences: Sequences, inputs: PlannerInputs) -> bool:
    """Return whether sequence i takes no longer than `other`: no more work or tokens, and no costlier halo."""
    lighter = sequences.attention[i] <= sequences.attention[other] and sequences.linear[i] <= sequences.linear[other]
    shorter = sequences.tokens[i] <= sequences.tokens[other]
    # With halos only for equal lengths: a shorter sequence has shorter chunks, which may need more halo messages.
    return bool(lighter and shorter and (not inputs.prices.reach or sequences.tokens[i] == sequences.tokens[other]))


@kernel
def _least(i: int, enough: float, speeds: FloatArray, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least seconds of a sequence over all degrees; stop at the first value up to `enough`."""
    least = np.inf
    # Try every degree: seconds jump where groups begin to cross nodes, so a local minimum need not be the least.
    for degree in range(least_degree(i, sequences, inputs), inputs.num_ranks + 1):
        # The slowest of any `degree` ranks is at best the degree-th fastest of all.
        least = min(least, alone_at_best(i, degree, sequences, inputs) / speeds[degree - 1])
        if least <= enough:
            break
    return float(least)


@kernel
def work_in_rings(longest_wave: float, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [sequences] the least rank-seconds that each adds to a pack that ends within `longest_wave` seconds.

    That is its work and, if it needs a ring of at least d ranks, t (k (d - 1) + e (c_d (d - 1) - g_d) + g_d); see
    `_least_area`. Costs that a pack pays once are not included, nor are rings if heads may be split.
    """
    least = np.zeros(len(sequences.work))
    for i in range(len(least)):
        least[i] = sequences.work[i]
        # With Ulysses sets, a ring of fewer sets costs less, so no ring cost is certain.
        if len(inputs.splits.heads):
            continue
        degree = least_degree(i, sequences, inputs)
        # The narrowest degree that ends in time: the cost below grows with the degree, so no pack adds less.
        while degree < inputs.num_ranks and alone_at_best(i, degree, sequences, inputs) > longest_wave:
            degree += 1
        if degree > 1:
            home = home_seconds(degree, inputs)
            exposed = inputs.prices.exposed * (traffic_seconds(degree, degree, inputs) - home) + home
            least[i] += (inputs.prices.chunk * (degree - 1) + exposed) * sequences.tokens[i]
    return least


@kernel
def traffic_seconds(degree: int, sets: int, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds of ring traffic per token, for a group of this degree with `sets` sets."""
    return least_of_tiers(inputs.prices.ring, degree, inputs) * (sets - 1)


@inlined
def home_seconds(degree: int, inputs: PlannerInputs) -> float:
    """Return the part of `traffic_seconds` that is never hidden: the ring's last hop."""
    return least_of_tiers(inputs.prices.home, degree, inputs)


@inlined
def least_of_tiers(prices: FloatArray, degree: int, inputs: PlannerInputs) -> float:
    """Return the price across nodes if a group of this degree must cross them, else the smaller of both tiers."""
    return float(prices[1] if degree > inputs.ranks_per_node else min(prices[0], prices[1]))
