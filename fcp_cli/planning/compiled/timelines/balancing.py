"""Balancing of single-rank packs: moves and swaps with the rank that ends last.

balance:  until nothing helps, the ranks are even, or the work limit is reached:
              take the rank that ends last                                        _last_to_end
              find the best move or swap with a sample of bins: the one after
              which the later of the two bins ends soonest                        _best_exchange
              apply it                                                            _exchange
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fcp_cli.compiling.compile import inlined, leaf
from fcp_cli.planning.compiled.core import NONE, PlannerInputs, Sequences, total_of
from fcp_cli.planning.compiled.timelines.single_rank_packs import (
    END,
    SingleRankPacks,
    closed_slot,
    put,
    slot_with_room,
    take,
)

_SAMPLE = 160  # most bins compared with the worst one at a time
_SAMPLES_IN_VAIN = 16  # samples without an exchange after which balancing ends
_EPSILON = 1e-9  # seconds: an exchange must gain more than rounding, or balancing would not terminate
_EVEN = 5e-5  # of the target: excess of the last rank over the mean at which balancing ends


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
    stride, evaluations = max(1, bins // _SAMPLE), 0
    best, best_i, best_j, best_bin = singles.free[worst] + _EPSILON, END, END, NONE
    i = singles.head[worst]
    while i != END:
        work, tokens = sequences.work[i], sequences.tokens[i]
        at = singles.slot_tokens[worst, singles.slot_of[i]]
        # If the sequence is alone in its slot, moving it also saves the slot's fixed seconds.
        alone = inputs.prices.beta if at + tokens == inputs.tokens_per_rank else 0.0
        for k in range(min(bins, _SAMPLE)):
            c = (sample + k * stride) % bins
            # Too full to improve on the best exchange so far.
            if c == worst or singles.free[c] <= best:
                continue
            evaluations += 1
            score = min(singles.free[worst] + work + alone, singles.free[c] - work)
            if score > best:
                # Without an open slot with room, a move opens one for beta, if the bin has a closed one.
                if slot_with_room(c, tokens, inputs, singles) == NONE:
                    score = min(score, singles.free[c] - work - inputs.prices.beta)
                    if score > best and closed_slot(c, singles) == NONE:
                        score = best
                if score > best:
                    best, best_i, best_j, best_bin = score, i, END, c
            j = singles.head[c]
            while j != END:
                evaluations += 1
                less = work - sequences.work[j]
                score = min(singles.free[worst] + less, singles.free[c] - less)
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
