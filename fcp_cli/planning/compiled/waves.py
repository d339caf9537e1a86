"""Waves under `sync: microbatch`: one after the other, each with the target that leaves the best rest for its time.

`plan` combines two parts: `search` decides the targets, and `replay` writes down the resulting waves. The search:

    while sequences wait, and the waves so far can still beat the best end known:
        if all waiting sequences may fit into one wave:                          last_wave
            find the smallest target for which they do; remember the best end
        list candidate targets: ends of the longest sequence, and a grid         candidates
        rate each: target + penalty + least seconds of its remainder             wave.outlook, _least_for_rest
        fill waves by the best rated targets; keep the one with the least        _choose_wave
            seconds + penalty + least seconds of its actual remainder
        continue with the remainder of that wave

`regroup` replans the waves of a step, two at a time:

    order waves by waste: their seconds beyond their evenly shared work
    for pairs of waves, neighbours in that order first:
        search at most two waves for their sequences that take less              search
        if found, replace the pair and order the waves again

Replanning one pair of w waves takes about 4 / w^2 of the time of searching the whole step, so all pairs together take
as long as two searches. It ends after some dozens of consecutive pairs without a gain.

No array overflows: every wave takes at least one sequence, so there are at most as many waves as sequences. The groups
of a wave are disjoint, so there are at most as many as ranks (`wave.Wave`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.core import (
    PlannerInputs,
    Sequences,
    across_at_best,
    across_of,
    alone_seconds,
    enter_load,
    falling_order,
    least_degree,
    load_at,
    make_loads,
    pack_seconds,
    padded_load,
    recomputation_seconds,
    together,
    total_of,
)
from fcp_cli.planning.compiled.wave import Pool, Wave, fill_wave, make_wave, outlook, wait_for_next, wave_seconds
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf

# Penalty for refused work, as a share of its evenly shared seconds. The bound of the remainder assumes even sharing, so
# it does not see that refused work needs rings in a later wave. Without the penalty, on 2,048 ranks, one ring took all
# ranks while thirty more waited for ever later waves.
_REFUSAL = 0.25
# Degrees of the groups on ranks that rings leave free. Targets are tried with the first; the winner is refilled with
# the others.
_WIDTHS = 2, 1, 4, 8
_MARGIN = 1e-9  # relative; seconds that differ by less are equal up to rounding


class Effort(NamedTuple):
    """Effort of a search: candidate targets rated per wave, and how many of the best rated are filled."""

    tries: int
    fills: int


class Leader(NamedTuple):
    """Targets and widths of an equivalent part's waves, to follow; both empty to search."""

    targets: FloatArray
    widths: IntArray


class Waves(NamedTuple):
    """A planned step, or its first waves.

    Attributes:
        targets, widths: [waves] target of each wave, and the width of its groups of free ranks.
        wave, degree, first: [groups] wave, degree and first rank of each group that has sequences.
        group_of: [sequences] the group of each; -1 if it is left over.
        left: number of sequences left over.
    """

    targets: FloatArray
    widths: IntArray
    wave: IntArray
    degree: IntArray
    first: IntArray
    group_of: IntArray
    left: int


@kernel
def planned(
    patience: int,
    limit: float,
    effort: Effort,
    last: bool,
    leader: Leader,
    places: Places,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> Any:
    """Search and write down the waves: all if `last`, else all but the last one, whose sequences the next part replans.

    With a patience, `regroup` in its place, and with a leader, `_follow`: one entry point, so that what all call is
    compiled once.

    Returns:
        Seconds of the searched step, which are `limit` if no step beats it, and the waves; or seconds gained, no waves.
    """
    kept, seconds, targets, widths = 0, 0.0, leader.targets, leader.widths
    if patience:
        seconds = regroup(patience, effort, places, sequences, inputs)
    elif len(targets):
        targets = _follow(targets, widths, sequences, inputs)
        kept = len(targets)
    else:
        seconds, targets, widths = search(limit, effort, sequences, inputs)
        kept = len(targets) if last else max(0, len(targets) - 1)
    return seconds, replay(targets[:kept], widths[:kept], sequences, inputs)


@kernel
def _follow(targets: FloatArray, widths: IntArray, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the targets of an equivalent part for this one, with a later last one if needed."""
    wave, own_targets, used = make_wave(sequences, inputs), targets.copy(), len(targets)
    left = len(sequences.work)
    for w in range(len(targets) - 1):
        left = fill_wave(targets[w], widths[w], sequences, inputs, wave)
        wait_for_next(wave.pool.left_over, left, wave.pool)
        if left == 0:
            used = w + 1
            break
    # All parts share their waves, so only the last may have a later target.
    last, step = len(targets) - 1, 2.5e-4
    while left and fill_wave(own_targets[last], widths[last], sequences, inputs, wave):
        own_targets[last] *= 1.0 + step
        step *= 2.0
        if step > 0.1:
            break  # not equivalent: some sequences will be left over
    return own_targets[:used]


@kernel
def replay(targets: FloatArray, widths: IntArray, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Fill the waves again and write down the groups and their sequences."""
    n, wave = len(sequences.work), make_wave(sequences, inputs)
    pool = wave.pool
    # Every group holds a sequence, so there are at most as many groups.
    wave_of, degree_of = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    first_of, group_of = np.zeros(n, dtype=np.int64), np.full(n, -1)
    number_of = np.zeros(inputs.num_ranks, dtype=np.int64)  # of the wave's groups among all groups
    groups = 0
    for w in range(len(targets)):
        # `fill_wave` only writes the groups of the sequences that it takes.
        wave.group_of[:] = -1
        left = fill_wave(targets[w], widths[w], sequences, inputs, wave)
        for g in range(wave.groups[0]):
            # Drop idle groups.
            if wave.loads.tokens[g] == 0:
                continue
            wave_of[groups], degree_of[groups], first_of[groups] = w, wave.degree[g], wave.first[g]
            number_of[g] = groups
            groups += 1
        for k in range(pool.num_waiting[0]):
            if wave.group_of[pool.waiting[k]] >= 0:
                group_of[pool.waiting[k]] = number_of[wave.group_of[pool.waiting[k]]]
        wait_for_next(pool.left_over, left, pool)
    return Waves(
        targets, widths, wave_of[:groups], degree_of[:groups], first_of[:groups], group_of, pool.num_waiting[0]
    )


@kernel
def search(limit: float, effort: Effort, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Search greedily over waves; see the module.

    Args:
        limit: makespan to beat.
        effort: candidate targets per wave.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.

    Returns:
        Seconds of the step; target of each wave; width of each wave's groups of free ranks. The limit and no waves if
        no step beats it.
    """
    n, wave = len(sequences.work), make_wave(sequences, inputs)
    pool = wave.pool
    targets, widths = np.zeros(n), np.ones(n, dtype=np.int64)
    total, _ = _totals(pool.waiting, n, pool, sequences)
    tolerance = 5e-4 * total / inputs.num_ranks
    done = 0.0
    best, best_wave, best_target, best_width = limit, -1, 0.0, 1
    for w in range(n):
        work, tokens = _totals(pool.waiting, pool.num_waiting[0], pool, sequences)
        # No continuation can win.
        if done + _bound(work, tokens, inputs) >= best:
            break
        if tokens <= inputs.num_ranks * inputs.tokens_per_rank:
            # Wide groups hold longer sequences, single ranks waste less: neither is always better.
            for width in _WIDTHS:
                last = last_wave(width, best - done, tolerance, sequences, inputs, wave)
                if done + last < best:
                    best, best_wave, best_target, best_width = done + last, w, last, width
        target, width, left = _choose_wave(effort, sequences, inputs, wave)
        # No target takes a sequence: keep the best step so far.
        if left < 0:
            break
        targets[w], widths[w] = target, width
        # Count the target: packs may end sooner, never later.
        done += target
        wait_for_next(pool.kept, left, pool)
        if left == 0:
            if done < best:
                best, best_wave, best_target, best_width = done, w, target, width
            break
    if best_wave >= 0:
        # The best step may have ended before the last wave searched; drop later ones.
        targets[best_wave], widths[best_wave] = best_target, best_width
    return best, targets[: best_wave + 1], widths[: best_wave + 1]


@kernel
def last_wave(
    width: int, limit: float, tolerance: float, sequences: Sequences, inputs: PlannerInputs, wave: Wave
) -> float:
    """Return the smallest target found for which all waiting sequences fit in one wave; infinite if above `limit`."""
    work, tokens = _totals(wave.pool.waiting, wave.pool.num_waiting[0], wave.pool, sequences)
    # Start at a lower bound, since each `fill_wave` costs a pass over all waiting sequences.
    low = max(_bound(work, tokens, inputs), _shortest(wave.pool.waiting[0], sequences, inputs))
    # Give up well above the bound: sequences may not pack into the token budget at any target.
    limit = min(limit, 4.0 * low)
    # Doubling steps: the first fit is usually a fraction of a percent above the bound, but may be far.
    high, step = low, 0.0025
    while fill_wave(high, width, sequences, inputs, wave):
        low = high
        high *= 1.0 + step
        step *= 2.0
        if low > limit:
            return np.inf
    while high - low > tolerance:
        middle = 0.5 * (low + high)
        if fill_wave(middle, width, sequences, inputs, wave):
            low = middle
        else:
            high = middle
    return high


@kernel
def _choose_wave(effort: Effort, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> Any:
    """Choose the next wave among the best rated targets, and keep its remainder in `pool.kept`.

    Each target is filled with the first width of `_WIDTHS` for groups of free ranks. Then the best target is refilled
    with the other widths.

    Returns:
        The target, the width, and the number of sequences left, or -1 if no wave takes any.
    """
    targets, penalty, worth = _rate(effort.tries, sequences, inputs, wave)
    by_worth = falling_order(worth)
    least, chosen, chosen_width, kept = np.inf, 0, _WIDTHS[0], -1
    tried = min(effort.fills, effort.tries)
    for x in range(tried + len(_WIDTHS) - 1):
        rated = x < tried
        c, width = by_worth[x] if rated else chosen, _WIDTHS[0 if rated else x - tried + 1]
        # Skip: the rating treats small sequences as a fluid, which real ones seldom beat.
        if rated and -worth[c] >= least:
            continue
        seconds, rest, left = _fill_and_rate(targets[c], width, sequences, inputs, wave)
        value = seconds + penalty[c] + rest
        if value < least:
            least, chosen, chosen_width, kept = value, c, width, left
            for k in range(left):
                wave.pool.kept[k] = wave.pool.left_over[k]
    return targets[chosen], chosen_width, kept


@kernel
def _rate(tries: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> Any:
    """Return [tries] the candidate targets of the next wave, the penalty of each, and its worth.

    The worth is the negated sum of target, penalty and predicted seconds of all later waves.
    """
    targets = candidates(tries, wave.pool, sequences, inputs)
    penalty, worth = np.zeros(tries), np.zeros(tries)
    for c in range(tries):
        work, tokens, refused, longest = outlook(targets[c], sequences, inputs, wave)
        penalty[c] = _REFUSAL * refused / inputs.num_ranks
        rest = _least_for_rest(work, tokens, longest, wave.pool, sequences, inputs)
        worth[c] = -(targets[c] + penalty[c] + rest)
    return targets, penalty, worth


@kernel
def candidates(tries: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs) -> FloatArray:
    """Return [tries] targets to try for the next wave.

    Up to half of them are the ends of the longest sequence on each degree that is a few percent faster than the one
    before. The rest is a grid from its shortest time to beyond that of the densest wave.
    """
    out, longest = np.zeros(tries), pool.waiting[0]
    work, _tokens = _totals(pool.waiting, pool.num_waiting[0], pool, sequences)
    lowest = _shortest(longest, sequences, inputs)
    even = inputs.prices.beta + 1.02 * work / inputs.num_ranks
    # Not beyond all waiting work shared evenly, nor far beyond the densest wave, but at least 1.3 x the lowest.
    highest = max(1.3 * lowest, min(even, 1.6 * _densest(pool, sequences, inputs)))
    n, previous = 0, np.inf
    for degree in range(least_degree(longest, sequences, inputs), inputs.num_ranks + 1):
        seconds = max(_alone(longest, degree, sequences, inputs), inputs.floor)
        # A degree that is hardly faster would only give the same wave again.
        if seconds <= highest + 1e-12 and seconds < previous * 0.97 and n < tries // 2:
            out[n] = seconds
            n += 1
            previous = seconds
    # The ends above are optimal if the longest sequence decides; the grid is for waves in which others do.
    steps = tries - n
    for k in range(steps):
        # Denser at the low end (an even grid is as good). No powers, whose last bit may differ between machines.
        x = (k + 0.5) / steps
        out[n] = lowest + (highest - lowest) * x * (0.6 + 0.4 * x)
        n += 1
    return out


@kernel
def _fill_and_rate(target: float, width: int, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> Any:
    """Fill a wave; return its seconds, and the least seconds and the number of the sequences that it leaves.

    The seconds of a wave that takes no sequence are infinite.
    """
    pool = wave.pool
    left = fill_wave(target, width, sequences, inputs, wave)
    if left == pool.num_waiting[0]:
        return np.inf, 0.0, left
    work, tokens = _totals(pool.left_over, left, pool, sequences)
    longest = pool.left_over[0] if left else -1
    return wave_seconds(inputs, wave), _least_for_rest(work, tokens, longest, pool, sequences, inputs), left


@leaf
def _least_for_rest(
    work: float, tokens: int, longest: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs
) -> float:
    """Return the expected seconds of the rest after a wave; `longest` is its longest sequence, or -1 if it is empty."""
    if longest < 0:
        return 0.0
    if pool.shortest[longest] == 0.0:  # cached: needed for every target of every wave that leaves this sequence
        pool.shortest[longest] = _shortest(longest, sequences, inputs)
    least = _bound(work, tokens, inputs)
    # Whole waves would rate targets equally unless they save a wave; an expected fill prices every remaining token.
    if inputs.fill > 0.0:
        waves = max(1.0, tokens / (inputs.fill * inputs.num_ranks * inputs.tokens_per_rank))
        least = _least_for(waves, work, tokens, inputs)
    return float(max(least, pool.shortest[longest]))


@leaf
def _bound(work: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return the least seconds for the work and tokens: all ranks always busy, and the fewest waves for the tokens."""
    wave_tokens = inputs.num_ranks * inputs.tokens_per_rank
    return _least_for((tokens + wave_tokens - 1) // wave_tokens, work, tokens, inputs)


@inlined
def _least_for(waves: float, work: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return the least seconds of at least so many waves, with the cheapest recomputation per token."""
    fixed = inputs.prices.beta * waves
    if inputs.prices.again[0, 0] > 0.0:
        held = min(inputs.shared_tokens, inputs.tokens_per_rank)
        again = recomputation_seconds(held, 1, inputs.prices)
        fixed = max(fixed, (inputs.prices.beta + again) * tokens / (inputs.num_ranks * held))
    return float(max(work / inputs.num_ranks + fixed, inputs.floor * waves))


@leaf
def _totals(members: IntArray, count: int, pool: Pool, sequences: Sequences) -> Any:
    """Return the total least rank-seconds and tokens of the sequences members[:count]."""
    work, tokens = 0.0, 0
    for k in range(count):
        work += pool.least[members[k]]
        tokens += sequences.tokens[members[k]]
    return work, tokens


@leaf
def _densest(pool: Pool, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of a wave filled with the heaviest sequences, shared evenly."""
    work, room = 0.0, inputs.num_ranks * inputs.tokens_per_rank
    for k in range(pool.num_waiting[0]):
        tokens = sequences.tokens[pool.waiting[k]]
        # The last one counts in part: this is a bound, not a packing.
        work += min(1.0, room / tokens) * sequences.work[pool.waiting[k]]
        room -= tokens
        if room <= 0:
            break
    return inputs.prices.beta + work / inputs.num_ranks


@leaf
def _shortest(i: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of a wave with only sequence i, on its best degree."""
    best = np.inf
    # Try all degrees: seconds jump where groups begin to cross nodes.
    for degree in range(least_degree(i, sequences, inputs), inputs.num_ranks + 1):
        best = min(best, _alone(i, degree, sequences, inputs))
    return float(max(best, inputs.floor))


@leaf
def _alone(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of sequence i alone at the best placement; infinite if the degree is not allowed."""
    if not inputs.allowed[degree]:
        return np.inf
    return alone_seconds(i, degree, across_at_best(degree, inputs), sequences, inputs)


class Places(NamedTuple):
    """The wave and the group of neighbouring ranks of each sequence of a step.

    Attributes:
        wave, degree, first: [sequences] wave of each sequence; degree and first rank of its group.
        head: [waves] first sequence of each wave, -1 if it has none.
        after: [sequences] next sequence of the same wave, by rising position; -1 after the last.
    """

    wave: IntArray
    degree: IntArray
    first: IntArray
    head: IntArray
    after: IntArray


@kernel
def regroup(patience: int, effort: Effort, places: Places, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Replan pairs of waves, in place; a wave may end up empty.

    Args:
        patience: consecutive pairs without a gain after which the search ends.
        effort: candidate targets of each wave of a pair.
        places: the step; `head` and `after` need not be set.
        sequences, inputs: the sequences by falling work, and the ranks.

    Returns:
        The seconds gained.
    """
    waves = len(places.head)
    places.head[:] = -1
    for i in range(len(places.after) - 1, -1, -1):
        _enter(i, places.wave[i], places)
    seconds, waste = np.zeros(waves), np.zeros(waves)
    for wave in range(waves):
        seconds[wave], waste[wave] = _seconds_of(wave, places, sequences, inputs)
    before = total_of(seconds)
    order, distance, at, kept = falling_order(waste), 1, 0, 0
    while kept < patience:
        if at + distance >= waves:
            distance, at = distance + 1, 0
        if distance >= waves:
            break
        one, other = order[at], order[at + distance]
        at, kept = at + 1, kept + 1
        limit = (seconds[one] + seconds[other]) * (1.0 - _MARGIN)
        # Skip a wave that an earlier pair emptied: the other one would be replanned alone.
        if min(seconds[one], seconds[other]) == 0.0:
            continue
        if _replan(one, other, limit, effort, places, sequences, inputs):
            seconds[one], waste[one] = _seconds_of(one, places, sequences, inputs)
            seconds[other], waste[other] = _seconds_of(other, places, sequences, inputs)
            order, kept = falling_order(waste), 0
    return float(before - total_of(seconds))


@kernel
def _replan(
    one: int,
    other: int,
    limit: float,
    effort: Effort,
    places: Places,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> bool:
    """Replan the sequences of two waves, in place; return False if no plan takes less than the limit."""
    members = _members_of(one, other, places)
    own = Sequences(
        sequences.attention[members], sequences.linear[members], sequences.work[members], sequences.tokens[members]
    )
    _seconds, targets, widths = search(limit, effort, own, inputs)
    # More than two waves cannot replace a pair.
    if not 0 < len(targets) <= 2:
        return False
    written = replay(targets, widths, own, inputs)
    places.head[one] = places.head[other] = -1
    # Backwards, since `_enter` inserts at the head.
    for k in range(len(members) - 1, -1, -1):
        i, group = members[k], written.group_of[k]
        _enter(i, other if written.wave[group] else one, places)
        places.degree[i], places.first[i] = written.degree[group], written.first[group]
    return True


@leaf
def _enter(i: int, wave: int, places: Places) -> None:
    """Insert a sequence at the head of a wave; all its other sequences must have higher positions."""
    places.wave[i], places.after[i], places.head[wave] = wave, places.head[wave], i


@kernel
def _seconds_of(wave: int, places: Places, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the seconds of a wave, and its waste: the seconds beyond its evenly shared work; 0 for an empty wave."""
    # Indexed by first rank, which identifies a group of a wave.
    loads, degrees = make_loads(inputs.num_ranks), np.zeros(inputs.num_ranks, dtype=np.int64)
    work, seconds, i = 0.0, inputs.floor, places.head[wave]
    if i < 0:
        return 0.0, 0.0
    while i >= 0:
        first = places.first[i]
        degrees[first] = places.degree[i]
        load = padded_load(i, degrees[first], sequences, inputs)
        enter_load(first, together(load_at(first, loads), load), loads)
        work += sequences.work[i]
        i = places.after[i]
    for first in range(inputs.num_ranks):
        if degrees[first]:
            across = across_of(first, degrees[first], inputs)
            seconds = max(seconds, pack_seconds(load_at(first, loads), degrees[first], across, inputs))
    return seconds, seconds - work / inputs.num_ranks


@kernel
def _members_of(one: int, other: int, places: Places) -> IntArray:
    """Return the positions of the sequences of two waves, ascending."""
    found, count = np.zeros(len(places.after), dtype=np.int64), 0
    # Merge two ascending lists; positions are by falling work, the order that the search expects.
    i, j = places.head[one], places.head[other]
    while i >= 0 or j >= 0:
        if j < 0 or 0 <= i < j:
            found[count], i = i, places.after[i]
        else:
            found[count], j = j, places.after[j]
        count += 1
    return found[:count]
