"""`sync: microbatch`: one wave after the other, each with the target that leaves the best remainder for its time.

`plan` combines two parts: `search` decides the targets, and `replay` writes down the resulting waves. The search:

    while sequences wait, and the waves so far can still beat the best end known:
        if all waiting sequences may fit into one wave:                          last_wave
            find the smallest target for which they do; remember the best end
        list candidate targets: ends of the longest sequence, and a grid         candidates
        rate each: target + penalty + least seconds of its remainder             outlook, _least_for_rest
        fill waves by the best rated targets; keep the one with the least        _choose_wave
            seconds + penalty + least seconds of its actual remainder
        continue with the remainder of that wave

No array overflows: every wave takes at least one sequence, so there are at most as many waves as sequences. The groups
of a wave are disjoint, so there are at most as many as ranks (`wave.Wave`).
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

# Penalty for refused work, as a share of its evenly shared seconds. The bound of the remainder assumes even sharing, so
# it does not see that refused work needs rings in a later wave. Without the penalty, on 2,048 ranks, one ring took all
# ranks while thirty more waited for ever later waves.
_REFUSAL = 0.25
# Degrees of the groups on ranks that rings leave free. Targets are tried with the first; the winner is refilled with
# the others.
_WIDTHS = 2, 1, 4, 8


class Targets(NamedTuple):
    """Candidate targets of one wave.

    Attributes:
        seconds: [tries] end of the wave.
        value: [tries] predicted seconds of this wave and all later ones, plus the penalty.
        penalty: [tries] seconds of the penalty for refused work; see `wave.place_rings`.
        worth: [tries] sort key; targets are tried by falling worth.
    """

    seconds: FloatArray
    value: FloatArray
    penalty: FloatArray
    worth: FloatArray


class Waves(NamedTuple):
    """A planned step: wave, degree and first rank of each non-empty group, and [sequences] the group of each."""

    wave: IntArray
    degree: IntArray
    first: IntArray
    group_of: IntArray


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
def _bound(work: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return the least seconds for the work and tokens: all ranks always busy, and the fewest waves for the tokens."""
    wave_tokens = inputs.num_ranks * inputs.tokens_per_rank
    return _least_for((tokens + wave_tokens - 1) // wave_tokens, work, tokens, inputs)


@leaf
def _totals(members: IntArray, count: int, pool: Pool, sequences: Sequences) -> Any:
    """Return the total least rank-seconds and tokens of the sequences members[:count]."""
    work, tokens = 0.0, 0
    for k in range(count):
        work += pool.least[members[k]]
        tokens += sequences.tokens[members[k]]
    return work, tokens


@leaf
def _alone(i: int, degree: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of sequence i alone at the best placement; infinite if the degree is not allowed."""
    if not inputs.allowed[degree]:
        return np.inf
    return alone_seconds(i, degree, across_at_best(degree, inputs), sequences, inputs)


@leaf
def _shortest(i: int, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of a wave with only sequence i, on its best degree."""
    best = np.inf
    lowest = (sequences.tokens[i] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
    # Try all degrees: seconds jump where groups begin to cross nodes.
    for degree in range(lowest, inputs.num_ranks + 1):
        best = min(best, _alone(i, degree, sequences, inputs))
    return float(max(best, inputs.floor))


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
def _densest(count: int, pool: Pool, sequences: Sequences, inputs: PlannerInputs) -> float:
    """Return the seconds of a wave filled with the heaviest sequences, shared evenly."""
    work, room = 0.0, inputs.num_ranks * inputs.tokens_per_rank
    for k in range(count):
        tokens = sequences.tokens[pool.waiting[k]]
        # The last one counts in part: this is a bound, not a packing.
        work += min(1.0, room / tokens) * sequences.work[pool.waiting[k]]
        room -= tokens
        if room <= 0:
            break
    return inputs.prices.beta + work / inputs.num_ranks


@leaf
def candidates(count: int, out: FloatArray, pool: Pool, sequences: Sequences, inputs: PlannerInputs) -> int:
    """Fill `out` with targets to try for the next wave; return their number.

    Up to half of them are the ends of the longest sequence on each degree that is a few percent faster than the one
    before. The rest is a grid from its shortest time to beyond that of the densest wave.
    """
    longest = pool.waiting[0]
    work, _tokens = _totals(pool.waiting, count, pool, sequences)
    lowest = _shortest(longest, sequences, inputs)
    even = inputs.prices.beta + 1.02 * work / inputs.num_ranks
    # Not beyond all waiting work shared evenly, nor far beyond the densest wave, but at least 1.3 x the lowest.
    highest = max(1.3 * lowest, min(even, 1.6 * _densest(count, pool, sequences, inputs)))
    n, previous = 0, np.inf
    first = (sequences.tokens[longest] + inputs.tokens_per_rank - 1) // inputs.tokens_per_rank
    for degree in range(first, inputs.num_ranks + 1):
        seconds = max(_alone(longest, degree, sequences, inputs), inputs.floor)
        # A degree that is hardly faster would only give the same wave again.
        if seconds <= highest + 1e-12 and seconds < previous * 0.97 and n < len(out) // 2:
            out[n] = seconds
            n += 1
            previous = seconds
    # The ends above are optimal if the longest sequence decides; the grid is for waves in which others do.
    steps = len(out) - n
    for k in range(steps):
        # Denser at the low end (an even grid is as good). No powers, whose last bit may differ between machines.
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
    """Return the smallest target found for which all waiting sequences fit in one wave; infinite if above `limit`."""
    work, tokens = _totals(pool.waiting, count, pool, sequences)
    # Start at a lower bound, since each `fill_wave` costs a pass over all waiting sequences.
    low = max(_bound(work, tokens, inputs), _shortest(pool.waiting[0], sequences, inputs))
    # Give up well above the bound: sequences may not pack into the token budget at any target.
    limit = min(limit, 4.0 * low)
    # Doubling steps: the first fit is usually a fraction of a percent above the bound, but may be far.
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
    """Write the candidate targets of the next wave and their ratings to `targets`; return their number."""
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
    """Fill a wave; return its seconds, and the least seconds and the number of the sequences that it leaves.

    The seconds of a wave that takes no sequence are infinite.
    """
    left = fill_wave(target, width, count, pool, sequences, inputs, wave)
    if left == count:
        return np.inf, 0.0, left
    work, tokens = _totals(pool.left_over, left, pool, sequences)
    longest = pool.left_over[0] if left else -1
    return wave_seconds(inputs, wave), _least_for_rest(work, tokens, longest, pool, sequences, inputs), left


@leaf
def _copy(values: IntArray, count: int, to: IntArray) -> None:
    """Copy the first `count` values to `to`."""
    for k in range(count):
        to[k] = values[k]


@kernel
def _choose_wave(
    fills: int, count: int, targets: Targets, pool: Pool, sequences: Sequences, inputs: PlannerInputs, wave: Wave
) -> Any:
    """Choose the next wave among the `fills` best rated targets, and keep its remainder in `pool.kept`.

    Each target is filled with the first width of `_WIDTHS` for groups of free ranks. Then the best target is refilled
    with the other widths.

    Returns:
        The target, the width, and the number of sequences left, or -1 if no wave takes any.
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
        # Skip: the rating treats small sequences as a fluid, which real ones seldom beat.
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
    """Search greedily over waves; see the module.

    Args:
        limit: makespan to beat.
        tries: candidate targets rated per wave.
        fills: best rated targets that are filled per wave.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.

    Returns:
        Seconds of the step; target of each wave; width of each wave's groups of free ranks. No waves if no step beats
        the limit.
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
        # No continuation can win.
        if done + _bound(work, tokens, inputs) >= best:
            break
        if tokens <= inputs.num_ranks * inputs.tokens_per_rank:
            # Wide groups hold longer sequences, single ranks waste less: neither is always better.
            for width in _WIDTHS:
                last = last_wave(width, best - done, tolerance, count, pool, sequences, inputs, wave)
                if done + last < best:
                    best, best_wave, best_target, best_width = done + last, w, last, width
        target, width, left = _choose_wave(fills, count, options, pool, sequences, inputs, wave)
        # No target takes a sequence: keep the best step so far.
        if left < 0:
            break
        targets[w], widths[w] = target, width
        # Count the target: packs may end sooner, never later.
        done += target
        count = left
        _copy(pool.kept, count, pool.waiting)
        if count == 0:
            if done < best:
                best, best_wave, best_target, best_width = done, w, target, width
            break
    if best_wave >= 0:
        # The best step may have ended before the last wave searched; drop later ones.
        targets[best_wave], widths[best_wave] = best_target, best_width
    return best, targets[: best_wave + 1], widths[: best_wave + 1]


@kernel
def plan(limit: float, tries: int, fills: int, is_last: bool, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Search and write down the waves: all if `is_last`, else all but the last, whose sequences the next part replans.

    Returns:
        The targets, none if no step beats the limit; the width of each wave's groups of free ranks; and the waves as
        returned by `replay`.
    """
    _seconds, targets, widths = search(limit, tries, fills, sequences, inputs)
    kept = len(targets) if is_last else max(0, len(targets) - 1)
    return targets, widths, replay(targets[:kept], widths[:kept], sequences, inputs)


@kernel
def follow(targets: FloatArray, widths: IntArray, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the waves by the targets of an equivalent part, with a later last one if needed; see `replay`."""
    n = len(sequences.work)
    wave, pool, count = make_wave(n, inputs), make_pool(sequences, inputs), n
    own_targets, used = targets.copy(), len(targets)
    for w in range(len(targets) - 1):
        count = fill_wave(targets[w], widths[w], count, pool, sequences, inputs, wave)
        _copy(pool.left_over, count, pool.waiting)
        if count == 0:
            used = w + 1
            break
    # All parts share their waves, so only the last may have a later target.
    last, step = len(targets) - 1, 2.5e-4
    while count and fill_wave(own_targets[last], widths[last], count, pool, sequences, inputs, wave):
        own_targets[last] *= 1.0 + step
        step *= 2.0
        if step > 0.1:
            break  # not equivalent: some sequences will be left over
    return replay(own_targets[:used], widths[:used], sequences, inputs)


@kernel
def replay(targets: FloatArray, widths: IntArray, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Fill the waves again and write down the groups and their sequences.

    Returns:
        The waves, the number of groups, and the number of sequences left over.
    """
    n = len(sequences.work)
    wave, pool, count = make_wave(n, inputs), make_pool(sequences, inputs), n
    # Every group holds a sequence, so there are at most as many groups.
    wave_of, degree_of = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    first_of, group_of = np.zeros(n, dtype=np.int64), np.full(n, -1)
    number_of = np.zeros(inputs.num_ranks, dtype=np.int64)  # of the wave's groups among all groups
    groups = 0
    for w in range(len(targets)):
        # `fill_wave` only writes the groups of the sequences that it takes.
        wave.group_of[:] = -1
        left = fill_wave(targets[w], widths[w], count, pool, sequences, inputs, wave)
        for g in range(wave.groups[0]):
            # Drop idle groups.
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
