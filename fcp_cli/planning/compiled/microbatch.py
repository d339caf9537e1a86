"""`sync: microbatch`: successive waves, each by the target that leaves the least behind for what it takes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fcp_cli.plan.step import FloatArray, Int64Array
from fcp_cli.planning.compiled.compiling import kernel
from fcp_cli.planning.compiled.core import Machine, Sequences, alone_seconds, with_room_for
from fcp_cli.planning.compiled.wave import Wave, fill_wave, make_wave, outlook, wave_seconds

BoolArray: TypeAlias = npt.NDArray[np.bool_]

_REFUSAL = 0.25  # of the seconds that refused work would fill, as a penalty


@kernel
def _bound(work: float, tokens: int, machine: Machine) -> float:
    """Least seconds for so much work and so many tokens: all ranks busy, waves as few as the budget allows."""
    capacity = machine.num_ranks * machine.budget
    return work / machine.num_ranks + machine.beta * ((tokens + capacity - 1) // capacity)


@kernel
def _totals(alive: Int64Array, count: int, sequences: Sequences) -> Any:
    work, tokens = 0.0, 0
    for k in range(count):
        work += sequences.work[alive[k]]
        tokens += sequences.tokens[alive[k]]
    return work, tokens


@kernel
def _alone(i: int, degree: int, sequences: Sequences, machine: Machine) -> float:
    if not machine.allowed[degree]:
        return np.inf
    return alone_seconds(
        sequences.attention[i],
        sequences.linear[i],
        sequences.tokens[i],
        degree,
        degree > machine.per_node,
        machine,
    )


@kernel
def _shortest(i: int, sequences: Sequences, machine: Machine) -> float:
    """Seconds of sequence i alone on the degree that suits it best."""
    best = np.inf
    for degree in range((sequences.tokens[i] + machine.budget - 1) // machine.budget, machine.num_ranks + 1):
        best = min(best, _alone(i, degree, sequences, machine))
    return best


@kernel
def _rest(
    work: float, tokens: int, longest: int, shortest: FloatArray, sequences: Sequences, machine: Machine
) -> float:
    """Least seconds of what a wave leaves, its longest sequence given or -1; `shortest` remembers `_shortest`."""
    if longest < 0:
        return 0.0
    if shortest[longest] == 0.0:
        shortest[longest] = _shortest(longest, sequences, machine)
    return float(max(_bound(work, tokens, machine), shortest[longest]))


@kernel
def _densest(alive: Int64Array, count: int, sequences: Sequences, machine: Machine) -> float:
    """Seconds of a wave that holds its whole budget of the longest sequences, spread evenly."""
    work, room = 0.0, machine.num_ranks * machine.budget
    for k in range(count):
        tokens = sequences.tokens[alive[k]]
        work += min(1.0, room / tokens) * sequences.work[alive[k]]
        room -= tokens
        if room <= 0:
            break
    return machine.beta + work / machine.num_ranks


@kernel
def candidates(alive: Int64Array, count: int, sequences: Sequences, machine: Machine, out: FloatArray) -> int:
    """Targets worth a look for the next wave: those at which its longest sequence just ends, and a grid."""
    longest = alive[0]
    work, _tokens = _totals(alive, count, sequences)
    lowest = _shortest(longest, sequences, machine)
    highest = min(machine.beta + 1.02 * work / machine.num_ranks, 1.6 * _densest(alive, count, sequences, machine))
    highest = max(1.3 * lowest, highest)
    n, previous = 0, np.inf
    first = (sequences.tokens[longest] + machine.budget - 1) // machine.budget
    for degree in range(first, machine.num_ranks + 1):
        seconds = _alone(longest, degree, sequences, machine)
        if seconds <= highest + 1e-12 and seconds < previous * 0.97 and n < len(out) // 2:
            out[n] = seconds
            n += 1
            previous = seconds
    steps = len(out) - n
    for k in range(steps):
        # Denser towards the lowest; without powers, whose last bit differs between machines.
        x = (k + 0.5) / steps
        out[n] = lowest + (highest - lowest) * x * (0.6 + 0.4 * x)
        n += 1
    return n


@kernel
def last_wave(
    pair: bool,
    limit: float,
    tolerance: float,
    alive: Int64Array,
    count: int,
    scratch: Int64Array,
    later: Int64Array,
    sequences: Sequences,
    machine: Machine,
    wave: Wave,
) -> float:
    """The smallest target found by which everything alive fits in one wave, or infinity if it is over the limit."""
    work, tokens = _totals(alive, count, sequences)
    low = max(_bound(work, tokens, machine), _shortest(alive[0], sequences, machine))
    # Not every batch within the budget of all ranks can be packed into it: give up well above the bound.
    limit = min(limit, 4.0 * low)
    high, step = low, 0.0025
    while fill_wave(high, pair, alive, count, scratch, later, sequences, machine, wave):
        low = high
        high *= 1.0 + step
        step *= 2.0
        if low > limit:
            return np.inf
    while high - low > tolerance:
        middle = 0.5 * (low + high)
        if fill_wave(middle, pair, alive, count, scratch, later, sequences, machine, wave):
            low = middle
        else:
            high = middle
    return high


@kernel
def search(tries: int, fills: int, sequences: Sequences, machine: Machine) -> Any:
    """Greedy over waves; (seconds, target of each wave, whether its single ranks go in pairs)."""
    n = len(sequences.work)
    wave = make_wave(n, machine)
    alive, count = np.arange(n), n
    child, later, kept = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    options, values, penalty = np.zeros(tries), np.zeros(tries), np.zeros(tries)
    targets, pairs = np.zeros(n), np.zeros(n, dtype=np.bool_)
    shortest = np.zeros(n)
    done = 0.0
    best, best_waves, best_last, best_pairs = np.inf, 0, 0.0, True
    total, _ = _totals(alive, count, sequences)
    for w in range(n):
        work, tokens = _totals(alive, count, sequences)
        if done + _bound(work, tokens, machine) >= best:
            break
        if tokens <= machine.num_ranks * machine.budget:
            for use_pairs in (True, False):
                last = last_wave(
                    use_pairs,
                    best - done,
                    5e-4 * total / machine.num_ranks,
                    alive,
                    count,
                    child,
                    later,
                    sequences,
                    machine,
                    wave,
                )
                if done + last < best:
                    best, best_waves, best_last, best_pairs = done + last, w, last, use_pairs
        m = candidates(alive, count, sequences, machine, options)
        for c in range(m):
            work, tokens, refused, longest = outlook(options[c], alive, count, child, later, sequences, machine, wave)
            penalty[c] = _REFUSAL * refused / machine.num_ranks
            values[c] = options[c] + penalty[c] + _rest(work, tokens, longest, shortest, sequences, machine)
        by_value = np.argsort(values[:m], kind="mergesort")
        chosen, chosen_pairs, chosen_value, kept_count = 0.0, True, np.inf, 0
        chosen_option = 0
        for x in range(min(fills, m) + 2):
            # At last the winner without pairs; and the first target, by which the longest sequence surely ends.
            c = by_value[x] if x < min(fills, m) else (chosen_option if x == min(fills, m) else 0)
            target = options[c]
            use_pairs = x < min(fills, m)
            if use_pairs and values[c] >= chosen_value:
                continue
            if x == min(fills, m) + 1 and chosen_value < np.inf:
                continue
            rest = fill_wave(target, use_pairs, alive, count, child, later, sequences, machine, wave)
            if rest == count:
                continue
            seconds = wave_seconds(machine, wave)
            work, tokens = _totals(child, rest, sequences)
            longest = child[0] if rest else -1
            value = seconds + penalty[c] + _rest(work, tokens, longest, shortest, sequences, machine)
            if value < chosen_value:
                chosen, chosen_pairs, chosen_value, kept_count = target, use_pairs, value, rest
                chosen_option = c
                kept[:rest] = child[:rest]
        if chosen_value == np.inf:
            break
        targets[w], pairs[w] = chosen, chosen_pairs
        done += chosen
        count = kept_count
        alive[:count] = kept[:count]
        if count == 0:
            if done < best:
                best, best_waves, best_last, best_pairs = done, w, chosen, chosen_pairs
            break
    targets[best_waves], pairs[best_waves] = best_last, best_pairs
    return best, targets[: best_waves + 1], pairs[: best_waves + 1]


class Waves(NamedTuple):
    """A planned step: the bins of all waves that hold sequences, back to back, and the bin of every sequence."""

    wave: Int64Array
    degree: Int64Array
    ranks: Int64Array
    bin_of: Int64Array


@kernel
def replay(targets: FloatArray, pairs: BoolArray, sequences: Sequences, machine: Machine) -> Any:
    """Fill the waves once more and write down who runs what.

    Returns:
        The waves, the number of bins, that of the bins' ranks, and how many sequences are left over.
    """
    n, num_waves = len(sequences.work), len(targets)
    wave = make_wave(n, machine)
    alive, count = np.arange(n), n
    child, later = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    # Every bin holds a sequence, so there are at most as many bins; of ranks there may be many times more.
    wave_of, degree_of = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    ranks_of, bin_of = np.zeros(machine.num_ranks, dtype=np.int64), np.full(n, -1)
    number_of = np.zeros(machine.num_ranks, dtype=np.int64)  # among all bins, of each bin of the wave
    bins, ranks = 0, 0
    for w in range(num_waves):
        wave.item_bin[:] = -1
        rest = fill_wave(targets[w], pairs[w], alive, count, child, later, sequences, machine, wave)
        ranks_of = with_room_for(ranks + machine.num_ranks, ranks_of)
        for b in range(wave.bins[0]):
            if wave.tokens[b] == 0:
                continue
            wave_of[bins], degree_of[bins], number_of[b] = w, wave.degree[b], bins
            bins += 1
            for k in range(wave.first[b], wave.first[b + 1]):
                ranks_of[ranks] = wave.ranks[k]
                ranks += 1
        for k in range(count):
            if wave.item_bin[alive[k]] >= 0:
                bin_of[alive[k]] = number_of[wave.item_bin[alive[k]]]
        alive[:rest] = child[:rest]
        count = rest
    return Waves(wave_of, degree_of, ranks_of, bin_of), bins, ranks, count
