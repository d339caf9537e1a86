"""Lower bounds that know of rings and waves, each proven in the docstring of its function.

Notation: N ranks of budget E tokens; sequence s has attention seconds a, linear seconds l and t tokens on one rank,
work w = a + l; a group of degree d moves c_d seconds of ring traffic per token and hop, c_d that of the network inside
a node for d <= ranks per node (or across nodes, were that faster), else that across nodes, and takes h more seconds a
hop; attention hides no more than a share 1 - e of its ring. Attention in windows whose halos travel is part of l,
and the halos follow it: y_d seconds per token of them and set further, at least two messages of z seconds each. A pack
takes at least as long as any of its sequences by itself on the same group, since no term of the cost model falls with a
sequence; T(s, d) is that time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.alone import (
    alone_at_best,
    at_best,
    home_seconds,
    least_of_tiers,
    traffic_seconds,
)
from fcp_cli.planning.compiled.core import (
    PlannerInputs,
    Sequences,
    falling_order,
    group_terms,
    is_way,
    most_of,
    recomputation_seconds,
    seconds_by,
    sequence_load,
    total_of,
    way_terms,
)

_STEPS = 24  # of bisection: 2^-24 of the interval is finer than any gap that is shown, and the bound holds at each step
_LONGEST = 4  # sequences whose wave is tried: each is a bound by itself, and those with less work bound less
_MARGIN = 1e-9  # relative; keeps rounding on the safe side


@inlined
def exchange_seconds(k: int, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds per token in which sets of the k-th heads degree exchange."""
    heads = inputs.splits.heads[k]
    # `exchange` is the seconds of each rank per token of the pack: times `heads` for all ranks of the set.
    inside = group_terms(heads, heads, 0, 0, inputs.prices).exchange
    across = group_terms(heads, heads, 0, 1, inputs.prices).exchange
    return float(heads * min(inside, across))


@kernel
def _least_area(i: int, makespan: float, outlasting: float, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least rank-seconds, without beta, of sequence i if its micro-batch must end within makespan.

    A pack of degree d takes its ranks sum l + max(sum (a + k (d - 1) t), (1 - e) x) + e x + sum g_d t + h' d, with k
    the seconds by which attention is longer for a token and hop, x = sum (c_d (d - 1) - g_d) t + h (d - 1) d the ring
    but for its last hop, g_d and h' that hop. It holds at most d E tokens, so that each of them bears 1 / E of what is
    h d or h' d. If (1 - e) (c_d (d - 1) - g_d) >= outlasting + k (d - 1), outlasting = max over sequences of a / t,
    the part of the ring that may hide outlasts attention in every pack, which takes at least sum (l + c_d (d - 1) t)
    and the hops. Elsewhere it takes at least sum (w + k (d - 1) t) and the exposed part. All of this grows with d.
    Halos add y_d (d - 1) for each token of theirs, and two messages, of which each token bears 2 z / E.

    If u ranks share heads the same holds of the ring of r = d / u sets, of which each member moves at least as much
    per token and hop; and all tokens are exchanged, for x_u each. Be d0 the least degree that ends in time: then
    r >= d0 / u, which bounds every d from there on.
    """
    least, first = np.inf, 0
    tokens = sequences.tokens[i]
    lowest = max(1, (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank)
    for degree in range(lowest, inputs.num_ranks + 1):
        # A degree that ends too late cannot hold the sequence in any schedule of this makespan.
        if alone_at_best(i, degree, sequences, inputs) > makespan:
            continue
        # The narrowest that ends in time: sets of heads bound from here on, see below.
        first = first if first else degree
        # Groups that only share heads move no ring at all; the loop below prices them.
        if inputs.splits.only and degree > 1:
            break
        area, hidden = ring_area(i, degree, degree, outlasting, sequences, inputs)
        least = min(least, area)
        if hidden or inputs.prices.ring[1] >= inputs.prices.ring[0]:
            break  # traffic only grows from here on
    # A group of `first` ranks or more has no fewer than this many sets of each heads degree.
    for k in range(len(inputs.splits.heads) if first > 1 else 0):
        sets = (first + inputs.splits.heads[k] - 1) // inputs.splits.heads[k]
        if inputs.splits.only and sets > 1:
            continue
        area, _hidden = ring_area(i, first, sets, outlasting, sequences, inputs)
        least = min(least, area + exchange_seconds(k, inputs) * tokens)
    return float(least)


@inlined
def ring_area(i: int, degree: int, sets: int, outlasting: float, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the least rank-seconds of sequence i in packs of this degree whose ring has so many sets.

    And whether attention hides the part of the ring that may hide.
    """
    # One set passes no ring; the caller adds its exchanges.
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
    # One case for all sequences of a degree, since a pack sums either all of the one or all of the other.
    if (1.0 - prices.exposed) * traffic < outlasting + longer:
        beside = prices.exposed * hops + messages
        return sequences.work[i] + (longer + prices.exposed * traffic + home) * tokens + beside, True
    return sequences.linear[i] + (traffic + home) * tokens + hops + messages, False


@kernel
def _microbatches(makespan: float, tokens: float, linear_per_token: float, inputs: PlannerInputs) -> float:
    """Return the least mean number of micro-batches per rank that hold so many tokens per rank; infinite if none can.

    A rank that runs m micro-batches holds at most m E tokens in them, and, since it works on them for at most
    makespan - m beta seconds, at most (makespan - m beta) / min(l / t). The ranks' mean (m, tokens) lies in the convex
    hull of these points.
    """
    # Nothing takes time, so that any number of micro-batches fits.
    if inputs.prices.beta + linear_per_token == 0.0:
        return tokens / inputs.tokens_per_rank
    # The most full micro-batches that end in time: up to their tokens the hull is the line of full ones.
    whole = np.floor(makespan / (inputs.prices.beta + inputs.tokens_per_rank * linear_per_token))
    if tokens <= whole * inputs.tokens_per_rank:
        return tokens / inputs.tokens_per_rank
    low = whole * inputs.tokens_per_rank
    high = (makespan - (whole + 1.0) * inputs.prices.beta) / linear_per_token if linear_per_token > 0.0 else np.inf
    high = min(high, (whole + 1.0) * inputs.tokens_per_rank)
    # Not even whole + 1 micro-batches a rank hold so many tokens in the time.
    if tokens > high:
        return np.inf
    return float(whole + (tokens - low) / (high - low))


@kernel
def area_bound(simple: float, waves: bool, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the makespan below which not even the areas of all micro-batches fit into N ranks.

    If a schedule of makespan T exists, every micro-batch ends within T, so each sequence takes its least area for T
    (`_least_area`, a function that falls with T). Under waves it ends within T - `other_waves`, which replaces T
    there. On top each rank pays beta for each of its micro-batches: on the mean at least `_microbatches` of them and at
    least one (an idle rank wastes T >= beta), under waves at least ceil(tokens / (N E)). With recomputation, beta and
    S(h) for h tokens of a rank are at least h times their least sum per token, that of `shared_tokens`. Their sum over
    N must be <= T; bisection keeps the largest T that is refuted.
    """
    n = len(sequences.work)
    tokens = total_of(sequences.tokens) / inputs.num_ranks  # of a rank, on the mean
    outlasting, linear_per_token = 0.0, np.inf
    least_tokens = inputs.shared_tokens
    paid = inputs.prices.beta + recomputation_seconds(least_tokens, 1, inputs.prices)
    for i in range(n):
        outlasting = max(outlasting, sequences.attention[i] / sequences.tokens[i])
        linear_per_token = min(linear_per_token, sequences.linear[i] / sequences.tokens[i])
    refuted, held = simple * (1.0 - _MARGIN), np.inf
    others = other_waves(sequences, inputs) if waves else 0.0
    for _step in range(_STEPS):
        # The simple bound first: if it holds, one pass over the sequences is all.
        makespan = simple * (1.0 + _MARGIN) if _step == 0 else 0.5 * (refuted + held)
        # No upper end is known yet: grow by a quarter until a makespan is not refuted.
        if held == np.inf and _step:
            makespan = refuted * 1.25
        total, longest = 0.0, makespan - others
        for i in range(n):
            # Ends in time on a single rank: no degree has a smaller area than its work.
            if inputs.prices.beta + sequences.work[i] <= longest and sequences.tokens[i] <= inputs.tokens_per_rank:
                total += sequences.work[i]
            else:
                total += _least_area(i, longest, outlasting, sequences, inputs)
        count = _microbatches(makespan, tokens, linear_per_token, inputs)
        # The margin keeps a step that fills its waves exactly from counting one wave more.
        count = max(1.0, np.ceil(tokens / inputs.tokens_per_rank - _MARGIN) if waves else count)
        fixed = max(inputs.prices.beta * count, tokens / least_tokens * paid)
        if total / inputs.num_ranks + fixed <= makespan:
            held = makespan
            if _step == 0:
                break
        else:
            refuted = makespan
    return float(refuted)


@kernel
def other_waves(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the least seconds of all waves but one, whichever that one is.

    No wave does more than the work of the densest N E tokens. The others do the rest, at best evenly; there are at
    least ceil(tokens / (N E)) - 1 of them, each of which pays beta, and lasts for its floor.
    """
    room = inputs.num_ranks * inputs.tokens_per_rank
    # Minus one token: tokens that fill the waves exactly need no further one.
    count = max(0, (total_of(sequences.tokens) - 1) // room)
    # The densest go into the wave that is left out: it takes the most work away.
    density, _thin = densities(sequences)
    left = total_of(sequences.work)
    for i in falling_order(density):
        taken = min(room, sequences.tokens[i])
        left -= sequences.work[i] * taken / sequences.tokens[i]
        room -= taken
        if room == 0:
            break
    # The margin: of no work left, sums in another order leave a last bit.
    seconds = (1.0 - _MARGIN) * max(0.0, left) / inputs.num_ranks + inputs.prices.beta * count
    return float(max(seconds, inputs.floor * count))


@kernel
def _held_without(skipped: int, by_density: IntArray, sequences: Sequences) -> Any:
    """Return [sequences] all but one by falling density, and [sequences] their tokens and work summed, from 0."""
    n, k = len(by_density), 0
    others, tokens, work = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
    for i in by_density:
        # Entry k of both sums is the first k of the others, from none on.
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
    """Return the most work that so many tokens can hold, sequences taken in fractions; see `_held_without`."""
    k = first_not_below(tokens, held_tokens)
    if k == 0 or held_tokens[k] < tokens:
        return float(held_work[k])
    # The last one in part: its tokens are of equal density.
    i = others[k - 1]
    return float(held_work[k - 1] + sequences.work[i] * (tokens - held_tokens[k - 1]) / sequences.tokens[i])


@kernel
def _wave_of(
    j: int,
    total: float,
    further_beta: float,
    dense: float,
    thin: float,
    by_density: IntArray,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> float:
    """Return the least makespan under waves, seen from the wave that runs j, over all degrees d that j may have.

    Let the wave last tau = T(j, d) + delta. Apart from j it does at most Y + X work. Y, on the N - d other ranks, is at
    most (N - d)(tau - beta), and at most the densest (N - d) E tokens without j. X, more sequences in j's own pack, is
    at most d delta if attention hides all of j's ring that may hide; if not, they add x tokens with
    (c_d (d - 1) + thin) x <= d delta and work <= dense x (thin, dense: least l / t and greatest w / t of any sequence).
    If u ranks share heads, T and c are those of the ring of d / u sets, and x tokens are exchanged as well.
    Other waves do the rest of the work, at least rest / N seconds, and pay beta each; any rest takes one wave at least.
    As long as there is a rest the sum is convex and piecewise linear in delta: its least value lies at delta = 0 or
    where Y stops growing, or else where nothing is left. If X could grow by more than N per
    second, only T(j, d) and the other waves' beta are counted.
    """
    num_ranks, beta = inputs.num_ranks, inputs.prices.beta
    without_j, held_tokens, held_work = _held_without(j, by_density, sequences)
    least = np.inf
    for degree in range(
        max(1, (sequences.tokens[j] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank), num_ranks + 1
    ):
        # The least over degrees is asked for: this one can only be longer.
        if alone_at_best(j, degree, sequences, inputs) + further_beta >= least:
            continue
        # Ranks beside j's pack.
        others = num_ranks - degree
        # Without j: it would be counted twice, here and in its own pack.
        held = _densest(float(others * inputs.tokens_per_rank), without_j, held_tokens, held_work, sequences)
        for k in range(-1, len(inputs.splits.heads) if degree > 1 else 0):
            shortest, growth = _growth(k, j, degree, dense, thin, sequences, inputs)
            if shortest + further_beta >= least:
                continue
            # Delta then pays more than it costs, without end: keep the parts that need no delta.
            if growth > num_ranks:
                least = min(least, shortest + further_beta)
                continue
            grown = sequences.work[j] + others * (shortest - beta)
            # All work is done in this wave from here on: either term of Y may be the missing work.
            enough = max(0.0, (total - grown) / (growth + others), (total - sequences.work[j] - held) / growth)
            value = shortest + further_beta + enough
            # Before that: convex and piecewise linear, so that the least value is at one of its two corners.
            for delta in (0.0, held / others - (shortest - beta) if others else 0.0):
                if 0.0 <= delta < enough:
                    done = min(grown + (growth + others) * delta, sequences.work[j] + growth * delta + held)
                    # Work that is left takes a wave, even if all tokens would fit into this one.
                    further = max(further_beta, beta) + (total - done) / num_ranks
                    value = min(value, shortest + delta + further)
            least = min(least, value)
    return float(least)


@kernel
def _growth(k: int, j: int, degree: int, dense: float, thin: float, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return T(j, d) with the k-th heads degree, -1 for a ring, and how much work j's pack gains for a second more."""
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
    # Sets wider than the key-value heads repeat them, and so move that much more.
    copies = max(1.0, inputs.splits.heads[k] / inputs.prices.key_value_heads) if k >= 0 else 1.0
    hides = sets <= 1 or load.attention >= (1.0 - inputs.prices.exposed) * (
        hidden * copies * load.tokens + inputs.prices.hop * (sets - 1) * degree
    )
    growth = 1.0 * degree
    if not hides:
        growth = max(growth, dense * degree / (traffic + exchange + thin))
    return shortest, growth


@kernel
def densities(sequences: Sequences) -> Any:
    """Return [sequences] work of a token of each, and the least linear work of a token of any."""
    density, thin = np.empty(len(sequences.work)), np.inf
    for i in range(len(density)):
        density[i] = sequences.work[i] / sequences.tokens[i]
        thin = min(thin, sequences.linear[i] / sequences.tokens[i])
    return density, thin


@kernel
def wave_bound(sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the largest of `_wave_of` over the sequences with the most work."""
    n = len(sequences.work)
    total, tokens = total_of(sequences.work), total_of(sequences.tokens)
    further_beta = inputs.prices.beta * max(0, (tokens - 1) // (inputs.num_ranks * inputs.tokens_per_rank))
    density, thin = densities(sequences)
    by_density, dense = falling_order(density), most_of(density)
    best = 0.0
    for j in range(min(_LONGEST, n)):
        # An equal sequence gives an equal bound.
        if j and sequences.work[j] == sequences.work[j - 1]:
            continue
        best = max(best, _wave_of(j, total, further_beta, dense, thin, by_density, sequences, inputs))
    return float(best * (1.0 - _MARGIN))


@leaf
def first_not_below(value: float, rising: FloatArray) -> int:
    """Return the position of the first of some values that is at least `value`, or of the last."""
    low, high = 0, len(rising) - 1
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
