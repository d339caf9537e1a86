"""Timelines under `sync: iteration`: the smallest target for which rings and single-rank packs fit, then balancing.

`schedule` starts from a lower bound and searches the smallest feasible target above it:

    given a makespan to beat: stop unless it is a feasible target
    double the gap to the lower bound until everything fits            _attempt
    bisect between the last gap that did not fit and the first that did
    try that target and three lower ones, in which some sequences end late;
        balance each, and keep the one that then ends first            balance
    rebuild that one, since the arrays hold the last attempt

An attempt for a target:

    sequences that no single rank can run by then become rings         _split
    rings take ranks on the timelines                                  ring_placement.place_rings
    single-rank sequences are laid into the time that rings leave      single_rank_packs.fill

Balancing moves and swaps sequences, until nothing helps, the ranks are even, or the work limit is reached:

    take the rank that ends last                                       _last_to_end
    find the best move or swap with a sample of bins: the one after
        which the later of the two bins ends soonest                   _best_exchange
    apply it                                                           _exchange
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.core import NONE, PlannerInputs, Sequences, total_of
from fcp_cli.planning.compiled.ring_placement import Rings, make_rings, place_rings
from fcp_cli.planning.compiled.single_rank_packs import (
    END,
    SingleRankPacks,
    closed_slot,
    eased,
    fill,
    make_single_rank_packs,
    put,
    slot_with_room,
    take,
    waits_for_host,
)
from fcp_cli.util.compiling import inlined, kernel, leaf

_ALIKE = 2e-4  # relative: a part may end this much later than the searched one without a later target
_SAMPLE = 160  # most bins compared with the worst one at a time
_SAMPLES_IN_VAIN = 16  # samples without an exchange after which balancing ends
_EPSILON = 1e-9  # seconds: an exchange must gain more than rounding, or balancing would not terminate
_EVEN = 5e-5  # of the target: excess of the last rank over the mean at which balancing ends


@kernel
def schedule(
    lower: float,
    limit: float,
    leader: tuple[float, float],
    work_limit: int,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> Any:
    """Return the best schedule found: rings and single-rank packs; its target and its end.

    The target is 0 if rings and packs do not fit by the limit. One entry point searches and follows, so that what both
    call is compiled once.

    Args:
        lower: seconds from which targets are searched, such as a lower bound.
        limit: makespan to beat, or infinite.
        leader: target and end that this function returned for an equivalent part, to follow them without a search; 0
            to search.
        work_limit: number of comparisons per balancing.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.
    """
    rings = make_rings(sequences, inputs)
    singles = make_single_rank_packs(sequences, inputs, rings)
    if leader[0] > 0.0:
        target, end = _follow(leader[0], leader[1], work_limit, sequences, inputs, rings, singles)
        return rings, singles, target, end
    # If it does not fit by the limit, it hardly fits sooner.
    if limit < np.inf and _attempt(limit, sequences, inputs, rings, singles) != 0:
        return rings, singles, 0.0, 0.0
    # A gap to `lower` that fits, and the largest known not to. This terminates, since large gaps always fit. It starts
    # small, since an attempt far above the first fit builds a poor step.
    gap, infeasible = 0.002, 0.0
    while _attempt(lower * (1.0 + gap), sequences, inputs, rings, singles) != 0:
        infeasible = gap
        gap *= 2.0
    # To 0.05 %: finer gains come from the lower targets below, and from balancing.
    while gap - infeasible > 0.0005:
        middle = 0.5 * (gap + infeasible)
        if _attempt(lower * (1.0 + middle), sequences, inputs, rings, singles) == 0:
            gap = middle
        else:
            infeasible = middle
    # Under lower targets some sequences end late at first, but balancing may still let their ranks end in time.
    best, best_target = np.inf, 0.0
    for k in range(4):
        target = lower * (1.0 + gap * (1.0 - k / 4.0))
        if _attempt(target, sequences, inputs, rings, singles) < 0:
            break  # lower targets need even wider rings
        end = balance(target, rings.gaps[0], work_limit, sequences, inputs, singles)
        if end < best:
            best, best_target = end, target
    # The arrays hold the last attempt; repeating the best one is cheaper than copying every improvement.
    _attempt(best_target, sequences, inputs, rings, singles)
    balance(best_target, rings.gaps[0], work_limit, sequences, inputs, singles)
    return rings, singles, best_target, best


@kernel
def _follow(
    target: float,
    end: float,
    work_limit: int,
    sequences: Sequences,
    inputs: PlannerInputs,
    rings: Rings,
    singles: SingleRankPacks,
) -> tuple[float, float]:
    """Schedule a part by the target of an equivalent one.

    If this part then ends later than the other one, later targets are tried, until all sequences end by the target. The
    best schedule is kept.
    """
    best, best_target, step, late = np.inf, target, 0.0, -1
    while best > end * (1.0 + _ALIKE) and late != 0:
        tried = target * (1.0 + step)
        late = _attempt(tried, sequences, inputs, rings, singles)
        if late >= 0:
            reached = balance(tried, rings.gaps[0], work_limit, sequences, inputs, singles)
            if reached < best:
                best, best_target = reached, tried
        step = 2.0 * step + 0.0005
    if best_target != tried:
        _attempt(best_target, sequences, inputs, rings, singles)
        balance(best_target, rings.gaps[0], work_limit, sequences, inputs, singles)
    return best_target, best


@kernel
def _attempt(
    target: float,
    sequences: Sequences,
    inputs: PlannerInputs,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Place rings, then single-rank sequences; return the number of late ones, or -1 if a ring or slot does not fit."""
    n = _split(target, sequences, inputs, rings, singles)
    if not place_rings(target, sequences, inputs, rings):
        return -1
    return int(fill(target, singles.order[:n], sequences, inputs, rings, singles))


@leaf
def _split(target: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings, singles: SingleRankPacks) -> int:
    """Put sequences that no single rank can run by target into `rings`, others into `singles.order`; count these."""
    count = 0
    n = 0
    for i in range(len(sequences.work)):
        # A ring costs communication and fixed seconds on each rank, so only sequences that need one get it.
        if sequences.tokens[i] > inputs.tokens_per_rank or inputs.prices.beta + sequences.work[i] > target:
            rings.sequence[count] = i
            count += 1
        else:
            singles.order[n] = i
            n += 1
    # An array of one element, since numbers are not passed by reference.
    rings.placed[0] = count
    return n


class Exchange(NamedTuple):
    """The next step of balancing: sequence `i` of the rank that ends last moves to `bin`, or swaps with `j` there.

    Attributes:
        i, j, bin: see above; `j` is END for a move, and `i` is END if nothing helps.
        evaluations: number of moves and swaps compared.
    """

    i: int
    j: int
    bin: int
    evaluations: int


@leaf
def balance(
    target: float, gaps: int, work_limit: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks
) -> float:
    """Move and swap sequences, in place, until the rank that ends last ends sooner; return its end.

    Args:
        target: end of the bins, from which their free seconds count back.
        gaps: number of gap bins, after those of the ranks.
        work_limit: number of comparisons after which balancing ends.
        sequences, inputs, singles: the sequences, the ranks, and the bins to balance.
    """
    bins = inputs.num_ranks + gaps
    evaluations, sample, in_vain = 0, 0, 0
    for rank in range(inputs.num_ranks):
        _enter_end(rank, inputs, singles)
    worst = _last_to_end(singles)
    # Exchanges hardly change the mean end of the ranks, so nothing is left to gain once all end close to it.
    even = total_of(singles.free[: inputs.num_ranks]) / inputs.num_ranks - _EVEN * target
    # Fruitless samples end the loop once they cover all bins, or `_SAMPLES_IN_VAIN` samples if there are more.
    while (
        singles.free[worst] < even
        and evaluations < work_limit
        and in_vain * _SAMPLE < min(bins, _SAMPLES_IN_VAIN * _SAMPLE)
    ):
        found = _best_exchange(worst, sample, bins, sequences, inputs, singles)
        evaluations += found.evaluations
        # Shift in any case, so that the next sample has other bins.
        sample += 1
        if found.i == END:
            in_vain += 1
            continue
        in_vain = 0
        _exchange(found.i, found.j, found.bin, sequences, inputs, singles)
        _enter_end(worst, inputs, singles)
        _enter_end(found.bin, inputs, singles)
        worst = _last_to_end(singles)
    return float(target - singles.free[worst])


@leaf
def _enter_end(b: int, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Update the free seconds of a rank's bin in the tree `soonest`; gaps never end a step, so they are not in it."""
    if b >= inputs.num_ranks:
        return
    node = (len(singles.soonest) >> 1) + b
    singles.soonest[node] = singles.free[b]
    while node > 1:
        node >>= 1
        singles.soonest[node] = min(singles.soonest[2 * node], singles.soonest[2 * node + 1])


@leaf
def _last_to_end(singles: SingleRankPacks) -> int:
    """Return the rank with the fewest free seconds; the first on ties."""
    leaves, node = len(singles.soonest) >> 1, 1
    while node < leaves:
        node = 2 * node if singles.soonest[2 * node] <= singles.soonest[2 * node + 1] else 2 * node + 1
    return node - leaves


@leaf
def _best_exchange(
    worst: int, sample: int, bins: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks
) -> Any:
    """Return the exchange of the worst bin with a sampled bin that leaves the fuller of the two the most free seconds.

    Neighbouring bins are similar, so a sample is spread over all bins and shifted from call to call.
    """
    stride, evaluations, hosts = max(1, bins // _SAMPLE), 0, inputs.prices.host > 0.0
    best, best_i, best_j, best_bin = singles.free[worst] + _EPSILON, END, END, NONE
    i = singles.head[worst]
    while i != END:
        work, tokens = sequences.work[i], sequences.tokens[i]
        slot, alone = singles.slot_of[i], 0.0
        at = singles.slot_tokens[worst, slot]
        # If the sequence is alone in its slot, moving it also saves the slot's fixed seconds.
        if at + tokens == inputs.tokens_per_rank:
            alone = inputs.prices.beta + waits_for_host(work, inputs)
        elif hosts:
            alone = eased(worst, slot, -work, inputs, singles)
        for k in range(min(bins, _SAMPLE)):
            c = (sample + k * stride) % bins
            # Too full to improve on the best exchange so far.
            if c == worst or singles.free[c] <= best:
                continue
            evaluations += 1
            # At best the slot waits for its host as long as the sequence takes.
            score = min(singles.free[worst] + work + alone, singles.free[c] - (0.0 if hosts else work))
            if score > best:
                to = slot_with_room(c, tokens, inputs, singles)
                # Without an open slot with room, a move opens one for beta, if the bin has a closed one.
                if to == NONE:
                    opened = inputs.prices.beta + waits_for_host(work, inputs)
                    score = min(score, singles.free[c] - work - opened)
                    if score > best and closed_slot(c, singles) == NONE:
                        score = best
                elif hosts:
                    score = min(score, singles.free[c] - work + eased(c, to, work, inputs, singles))
                if score > best:
                    best, best_i, best_j, best_bin = score, i, END, c
            j = singles.head[c]
            while j != END:
                evaluations += 1
                less = work - sequences.work[j]
                score = min(singles.free[worst] + less, singles.free[c] - less)
                if hosts:
                    kept = singles.free[worst] + less + eased(worst, slot, -less, inputs, singles)
                    score = min(kept, singles.free[c] - less + eased(c, singles.slot_of[j], less, inputs, singles))
                if score > best:
                    fewer = tokens - sequences.tokens[j]
                    left = singles.slot_tokens[c, singles.slot_of[j]]
                    # Both sequences trade slots: a swap neither opens nor closes one.
                    if _holds(at, -fewer, sequences.tokens[i], inputs) and _holds(left, fewer, tokens - fewer, inputs):
                        best, best_i, best_j, best_bin = score, i, j, c
                j = singles.after[j]
        i = singles.after[i]
    return Exchange(best_i, best_j, best_bin, evaluations)


@inlined
def _holds(left: int, more: int, tokens: int, inputs: PlannerInputs) -> bool:
    """Return whether a slot with `left` free tokens can swap a sequence of `tokens` for one with `more` tokens more."""
    if more <= 0:
        return True
    # A sequence alone in its slot may fill the whole budget, and so may its replacement.
    is_alone = left + tokens == inputs.tokens_per_rank
    held_back = 0 if is_alone else max(0, inputs.tokens_per_rank - inputs.shared_tokens)
    return bool(left - more >= held_back)


@leaf
def _exchange(i: int, j: int, c: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Move sequence i to bin c, or swap it with j there."""
    b, slot = singles.bin_of[i], singles.slot_of[i]
    if j == END:
        take(i, sequences, inputs, singles)
        to = slot_with_room(c, sequences.tokens[i], inputs, singles)
        if to == NONE:
            to = closed_slot(c, singles)
        put(i, c, to, sequences, inputs, singles)
        return
    # Remove both before inserting either, so that no slot has to hold both.
    other = singles.slot_of[j]
    take(i, sequences, inputs, singles)
    take(j, sequences, inputs, singles)
    put(j, b, slot, sequences, inputs, singles)
    put(i, c, other, sequences, inputs, singles)
