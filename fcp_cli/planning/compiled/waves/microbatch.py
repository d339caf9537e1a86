"""`sync: microbatch`: successive waves, each by the target that leaves the least work for its time.

`plan` is both parts in one: `search` decides the targets, and `replay` writes down the waves that follow from them:

    while sequences wait, and the waves so far can still beat the best end known:
        if all that waits may fit into one wave:                                 last_wave
            find the smallest target by which it does; remember the best end
        list candidate targets: ends of the longest sequence, and a grid         candidates
        rate each: target + penalty + least seconds of its remainder             outlook, _least_for_rest
        fill waves by the best rated targets; keep the one with the least        _choose_wave
            seconds + penalty + least seconds of its true remainder
        continue with the remainder of that wave

No array overflows: every wave takes a sequence at least, so there are at most as many waves as sequences; and the
groups of a wave share out its ranks, so there are at most as many as ranks (`wave.Wave`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel, leaf
from fcp_cli.planning.compiled.core import (
    PlannerInputs,
    Sequences,
    across_at_best,
    alone_seconds,
    falling_order,
    recomputation_seconds,
)
from fcp_cli.planning.compiled.waves.pool import Pool, make_pool
from fcp_cli.planning.compiled.waves.wave import Wave, fill_wave, make_wave, outlook, wave_seconds

# Of the seconds that refused work would fill, as a penalty: the bound of the remainder, which shares all work evenly,
# does not see that such work needs rings in a later wave.
# Without it, on 2,048 ranks, one ring took them all while thirty more waited for ever later waves.
_REFUSAL = 0.25
# Ranks of the groups that the ranks form which rings leave free. Waves are rated with the first width, then refilled
# with the others.
_WIDTHS = 2, 1, 4, 8


class Targets(NamedTuple):
    """Candidate targets of one wave.

    Attributes:
        seconds: [tries] by when the wave would end.
        value: [tries] predicted seconds of this wave and of all that follow, with the penalty.
        penalty: [tries] for work that a wave had ranks for, but not by the target.
        worth: [tries] of which they are tried the largest first.
    """

    seconds: FloatArray
    value: FloatArray
    penalty: FloatArray
    worth: FloatArray


class Waves(NamedTuple):
    """A planned step: the groups of all waves that hold sequences, by their first rank, and each sequence's group."""

    wave: IntArray
    degree: IntArray
    first: IntArray
    group_of: IntArray


@inlined
def _least_for(waves: float, work: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return the least seconds of so many waves or more, with recomputation of as few tokens a rank as pay for it."""
    fixed = inputs.prices.beta * waves
    if inputs.prices.again[0, 0] > 0.0:
        held = min(inputs.shared_tokens, inputs.tokens_per_rank)
        again = recomputation_seconds(held, 1, inputs.prices)
        fixed = max(fixed, (inputs.prices.beta + again) * tokens / (inputs.num_ranks * held))
    return float(max(work / inputs.num_ranks + fixed, inputs.floor * waves))


@leaf
def _bound(work: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return the least seconds for so much work and so many tokens: all ranks busy, waves as few as tokens allow."""
    wave_tokens = inputs.num_ranks * inputs.tokens_per_rank
    return _least_for((tokens + wave_tokens - 1) // wave_tokens, work, tokens, inputs)


@leaf
def _totals(members: IntArray, count: int, pool: Pool, sequences: Sequences) -> Any:
    """Return the least work and the tokens of the sequences members[:count]."""
    work, tokens = 0.0, 0
    for k in range(count):
        work += pool.least[members[k]]
        tokens += sequences.tokens[members[k]]
    return work, tokens


@leaf
def _alone(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of sequence i by itself on one of the allowed degrees, placed at best."""
    if not inputs.allowed[degree]:
        return np.inf
    return alone_seconds(i, degree, across_at_best(degree, inputs), sequences, inputs)


@leaf
def _shortest(i: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of a wave with only sequence i, on its best degree."""
    best = np.inf
    lowest = (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
    # All degrees: seconds jump at the degree at which groups cross nodes.
    for degree in range(lowest, inputs.num_ranks + 1):
        best = min(best, _alone(i, degree, sequences, inputs))
    return float(max(best, inputs.floor))


@leaf
def _least_for_rest(
    work: float, tokens: int, longest: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs
) -> float:
    """Return the seconds expected for the rest after a wave; `longest` is its longest sequence, -1 if there is none."""
    if longest < 0:
        return 0.0
    if pool.shortest[longest] == 0.0:  # asked for again by every target of every wave that leaves this sequence
        pool.shortest[longest] = _shortest(longest, sequences, inputs)
    least = _bound(work, tokens, inputs)
    # Whole waves make every target equal until it spares one more; a mean fill prices each token that is left.
    if inputs.fill > 0.0:
        waves = max(1.0, tokens / (inputs.fill * inputs.num_ranks * inputs.tokens_per_rank))
        least = _least_for(waves, work, tokens, inputs)
    return float(max(least, pool.shortest[longest]))


@leaf
def _densest(count: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of a wave whose ranks are all full of the longest sequences, spread evenly."""
    work, room = 0.0, inputs.num_ranks * inputs.tokens_per_rank
    for k in range(count):
        tokens = sequences.tokens[pool.waiting[k]]
        # The last one in fractions: this is a bound, not a packing.
        work += min(1.0, room / tokens) * sequences.work[pool.waiting[k]]
        room -= tokens
        if room <= 0:
            break
    return inputs.prices.beta + work / inputs.num_ranks


@leaf
def candidates(count: int, out: FloatArray, pool: Pool, sequences: Sequences, inputs: PlannerInputs) -> int:
    """Write targets worth trying for the next wave to `out`, and return how many: all that there is space for.

    The first half at most are those at which the longest sequence just ends, on each degree that is a few percent
    quicker than the one before; the rest is a grid from its shortest time up to that of the densest wave.
    """
    longest = pool.waiting[0]
    work, _tokens = _totals(pool.waiting, count, pool, sequences)
    lowest = _shortest(longest, sequences, inputs)
    even = inputs.prices.beta + 1.02 * work / inputs.num_ranks
    # Not beyond all that waits, shared evenly, nor far beyond ranks full of the longest; but the grid needs a range.
    highest = max(1.3 * lowest, min(even, 1.6 * _densest(count, pool, sequences, inputs)))
    n, previous = 0, np.inf
    first = (sequences.tokens[longest] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
    for degree in range(first, inputs.num_ranks + 1):
        seconds = max(_alone(longest, degree, sequences, inputs), inputs.floor)
        # A degree that is hardly quicker than the one before would only fill the same wave again.
        if seconds <= highest + 1e-12 and seconds < previous * 0.97 and n < len(out) // 2:
            out[n] = seconds
            n += 1
            previous = seconds
    # Ends of the longest sequence are exact optima for it; the grid is for waves whose other sequences decide.
    steps = len(out) - n
    for k in range(steps):
        # Denser towards the lowest (an even grid is as good); without powers, whose last bit differs between machines.
        x = (k + 0.5) / steps
        out[n] = lowest + (highest - lowest) * x * (0.6 + 0.4 * x)
        n += 1
    return n


@kernel
def last_wave(
    width: int,
    limit: float,
    tolerance: float,
    count: int,
    pool: Pool,
    sequences: Sequences,
    inputs: PlannerInputs,
    wave: Wave,
) -> float:
    """Return the smallest target found by which all that waits fits in one wave, or infinity if it exceeds `limit`."""
    work, tokens = _totals(pool.waiting, count, pool, sequences)
    # Exact bounds first: a target below one of them cannot fit, and each `fill_wave` costs a pass over all that waits.
    low = max(_bound(work, tokens, inputs), _shortest(pool.waiting[0], sequences, inputs))
    # Not every batch within the budget of all ranks can be packed into it: give up well above the bound.
    limit = min(limit, 4.0 * low)
    # Doubling steps: the first fit is usually a fraction of a percent above the bound, seldom far away.
    high, step = low, 0.0025
    while fill_wave(high, width, count, pool, sequences, inputs, wave):
        low = high
        high *= 1.0 + step
        step *= 2.0
        if low > limit:
            return np.inf
    while high - low > tolerance:
        middle = 0.5 * (low + high)
        if fill_wave(middle, width, count, pool, sequences, inputs, wave):
            low = middle
        else:
            high = middle
    return high


@leaf
def _rate(count: int, targets: Targets, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave) -> int:
    """List the candidate targets of the next wave with their ratings; return how many there are."""
    found = candidates(count, targets.seconds, pool, sequences, inputs)
    for c in range(found):
        work, tokens, refused, longest = outlook(targets.seconds[c], count, pool, sequences, inputs, wave)
        targets.penalty[c] = _REFUSAL * refused / inputs.num_ranks
        rest = _least_for_rest(work, tokens, longest, pool, sequences, inputs)
        targets.value[c] = targets.seconds[c] + targets.penalty[c] + rest
    return found


@kernel
def _fill_and_rate(
    target: float, width: int, count: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave
) -> Any:
    """Fill a wave; return its seconds, and the least seconds and number of the sequences that it leaves.

    A wave that takes nothing lasts forever.
    """
    left = fill_wave(target, width, count, pool, sequences, inputs, wave)
    if left == count:
        return np.inf, 0.0, left
    work, tokens = _totals(pool.left_over, left, pool, sequences)
    longest = pool.left_over[0] if left else -1
    return wave_seconds(inputs, wave), _least_for_rest(work, tokens, longest, pool, sequences, inputs), left


@leaf
def _copy(values: IntArray, count: int, to: IntArray) -> None:
    """Copy the first `count` values."""
    for k in range(count):
        to[k] = values[k]


@kernel
def _choose_wave(
    fills: int, count: int, targets: Targets, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave
) -> Any:
    """Choose the next wave among the `fills` best rated targets, and keep its remainder in `pool.kept`.

    Waves are filled with free ranks in pairs, at last with the winner's target and groups of the other widths. If
    no target took anything that is the first one, by which the longest sequence ends.

    Returns:
        The target, the width of its groups, and how many sequences are left, or -1 if nothing fits.
    """
    found = _rate(count, targets, pool, sequences, inputs, wave)
    for c in range(found):
        targets.worth[c] = -targets.value[c]
    by_value = falling_order(targets.worth[:found])
    least, chosen, chosen_width, kept = np.inf, 0, _WIDTHS[0], -1
    tried = min(fills, found)
    for x in range(tried + len(_WIDTHS) - 1):
        rated = x < tried
        c, width = by_value[x] if rated else chosen, _WIDTHS[0 if rated else x - tried + 1]
        # Rated as if small sequences were a fluid, which real ones seldom beat.
        if rated and targets.value[c] >= least:
            continue
        seconds, rest, left = _fill_and_rate(targets.seconds[c], width, count, pool, sequences, inputs, wave)
        value = seconds + targets.penalty[c] + rest
        if value < least:
            least, chosen, chosen_width, kept = value, c, width, left
            _copy(pool.left_over, left, pool.kept)
    return targets.seconds[chosen], chosen_width, kept


@kernel
def search(limit: float, tries: int, fills: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Search greedily over waves, as the module says.

    Args:
        limit: seconds of a step that is known; only a quicker one is of interest.
        tries: candidate targets rated for each wave.
        fills: packs of which so many are filled.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.

    Returns:
        Seconds of the step, and of each wave the target and the width of its groups of free ranks; no waves if none of
        these steps is quicker than the limit.
    """
    n = len(sequences.work)
    wave, pool, count = make_wave(n, inputs), make_pool(sequences, inputs), n
    options = Targets(np.zeros(tries), np.zeros(tries), np.zeros(tries), np.zeros(tries))
    targets, widths = np.zeros(n), np.ones(n, dtype=np.int64)
    total, _ = _totals(pool.waiting, count, pool, sequences)
    tolerance = 5e-4 * total / inputs.num_ranks
    done = 0.0
    best, best_wave, best_target, best_width = limit, -1, 0.0, 1
    for w in range(n):
        work, tokens = _totals(pool.waiting, count, pool, sequences)
        # No end from here on can win any more.
        if done + _bound(work, tokens, inputs) >= best:
            break
        if tokens <= inputs.num_ranks * inputs.tokens_per_rank:
            # Wide groups hold longer sequences, single ranks waste less: neither always wins.
            for width in _WIDTHS:
                last = last_wave(width, best - done, tolerance, count, pool, sequences, inputs, wave)
                if done + last < best:
                    best, best_wave, best_target, best_width = done + last, w, last, width
        target, width, left = _choose_wave(fills, count, options, pool, sequences, inputs, wave)
        # No target took anything: keep the best step so far.
        if left < 0:
            break
        targets[w], widths[w] = target, width
        # By the target: the wave's packs may end sooner, never later.
        done += target
        count = left
        _copy(pool.kept, count, pool.waiting)
        if count == 0:
            if done < best:
                best, best_wave, best_target, best_width = done, w, target, width
            break
    if best_wave >= 0:
        # The best step may have ended at an earlier wave than the search did: later ones are dropped.
        targets[best_wave], widths[best_wave] = best_target, best_width
    return best, targets[: best_wave + 1], widths[: best_wave + 1]


@kernel
def plan(limit: float, tries: int, fills: int, is_last: bool, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Search, and write down the waves that were found: all, or all but the last if more sequences follow.

    Returns:
        The targets, none if no step is quicker than the limit; the width of each wave's groups of free ranks; and
        the waves as `replay` returns them.
    """
    _seconds, targets, widths = search(limit, tries, fills, sequences, inputs)
    kept = len(targets) if is_last else max(0, len(targets) - 1)
    return targets, widths, replay(targets[:kept], widths[:kept], sequences, inputs)


@kernel
def follow(targets: FloatArray, widths: IntArray, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the waves by the targets of a like step, the last by a later one if need be, as `replay` does."""
    n = len(sequences.work)
    wave, pool, count = make_wave(n, inputs), make_pool(sequences, inputs), n
    own_targets, used = targets.copy(), len(targets)
    for w in range(len(targets) - 1):
        count = fill_wave(targets[w], widths[w], count, pool, sequences, inputs, wave)
        _copy(pool.left_over, count, pool.waiting)
        if count == 0:
            used = w + 1
            break
    # All parts run the same waves: only the last may outlast the target that the first part found.
    last, step = len(targets) - 1, 2.5e-4
    while count and fill_wave(own_targets[last], widths[last], count, pool, sequences, inputs, wave):
        own_targets[last] *= 1.0 + step
        step *= 2.0
        if step > 0.1:
            break  # not alike: some will be left over
    return replay(own_targets[:used], widths[:used], sequences, inputs)


@kernel
def replay(targets: FloatArray, widths: IntArray, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Fill the waves once more and write down the sequences of each group.

    Returns:
        The waves, the number of groups, and how many sequences are left over.
    """
    n = len(sequences.work)
    wave, pool, count = make_wave(n, inputs), make_pool(sequences, inputs), n
    # Every group holds a sequence, so there are at most as many groups.
    wave_of, degree_of = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    first_of, group_of = np.zeros(n, dtype=np.int64), np.full(n, -1)
    number_of = np.zeros(inputs.num_ranks, dtype=np.int64)  # among all groups, of each group of the wave
    groups = 0
    for w in range(len(targets)):
        # `fill_wave` writes the groups of what it takes, and nothing else.
        wave.group_of[:] = -1
        left = fill_wave(targets[w], widths[w], count, pool, sequences, inputs, wave)
        for g in range(wave.groups[0]):
            # A group that nothing came to is idle, and gets no row of the plan.
            if wave.loads.tokens[g] == 0:
                continue
            wave_of[groups], degree_of[groups], first_of[groups] = w, wave.degree[g], wave.first[g]
            number_of[g] = groups
            groups += 1
        for k in range(count):
            if wave.group_of[pool.waiting[k]] >= 0:
                group_of[pool.waiting[k]] = number_of[wave.group_of[pool.waiting[k]]]
        _copy(pool.left_over, left, pool.waiting)
        count = left
    return Waves(wave_of, degree_of, first_of, group_of), groups, count
