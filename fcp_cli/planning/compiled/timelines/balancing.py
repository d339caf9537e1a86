"""Balancing of single-rank packs: moves and swaps with the rank that ends last.

balance:  until nothing helps any more, ranks are as good as even, or the counted work is used up:
              take the rank that ends last                                               _last_to_end
              find the move or swap with a sample of bins after which the later of the
              two ends soonest, and do it                                                _best_exchange, _exchange
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

_SAMPLE = 160  # bins that balancing compares the worst bin with, at most
_SAMPLES_IN_VAIN = 16  # samples without a better exchange after which balancing ends
_EPSILON = 1e-9  # seconds: an exchange must gain more than rounding does, or balancing would not end
_EVEN = 5e-5  # of the target; ranks that end as close to their mean are not balanced further


class Exchange(NamedTuple):
    """The next move of balancing: sequence `i` of the rank that ends last moves to `bin`, or swaps with `j` there.

    Attributes:
        i, j, bin: see above; `j` is END for a move, and `i` is END if nothing helps.
        evaluations: pairs of sequences, and sequences with bins, that were compared.
    """

    i: int
    j: int
    bin: int
    evaluations: int


@leaf
def balance(
    target: float, gaps: int, work_limit: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks
) -> float:
    """Move and swap sequences so that the rank that ends last ends sooner; return its end.

    Args:
        target: seconds that the bins count their free seconds from.
        gaps: number of further bins, after those of the ranks.
        work_limit: comparisons after which no further exchange is sought.
        sequences, inputs, singles: the bins to balance.
    """
    bins = inputs.num_ranks + gaps
    evaluations, sample, in_vain = 0, 0, 0
    for rank in range(inputs.num_ranks):
        _enter_end(rank, inputs, singles)
    worst = _last_to_end(singles)
    # Exchanges move work about, so that the ranks' mean stays; it is out of reach if they end as good as together.
    even = total_of(singles.free[: inputs.num_ranks]) / inputs.num_ranks - _EVEN * target
    # Samples in vain end it once they have seen all bins, or `_SAMPLES_IN_VAIN` times the sample if there are more.
    while (
        singles.free[worst] < even
        and evaluations < work_limit
        and in_vain * _SAMPLE < min(bins, _SAMPLES_IN_VAIN * _SAMPLE)
    ):
        found = _best_exchange(worst, sample, bins, sequences, inputs, singles)
        evaluations += found.evaluations
        # Shifted even without a find: the next sample is of other bins.
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
    """Enter the seconds that a bin has left into the tree; gaps do not count, since something ends them anyway."""
    if b >= inputs.num_ranks:
        return
    node = (len(singles.soonest) >> 1) + b
    singles.soonest[node] = singles.free[b]
    while node > 1:
        node >>= 1
        singles.soonest[node] = min(singles.soonest[2 * node], singles.soonest[2 * node + 1])


@leaf
def _last_to_end(singles: SingleRankPacks) -> int:
    """Return the first rank with the fewest seconds left."""
    leaves, node = len(singles.soonest) >> 1, 1
    while node < leaves:
        node = 2 * node if singles.soonest[2 * node] <= singles.soonest[2 * node + 1] else 2 * node + 1
    return node - leaves


@leaf
def _best_exchange(
    worst: int, sample: int, bins: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks
) -> Any:
    """Find the exchange of the worst bin with one of a sample that leaves the fuller of the two the most seconds.

    Neighbouring bins hold much the same, so that a sample is spread over all of them, and shifted from call to call.
    """
    stride, evaluations = max(1, bins // _SAMPLE), 0
    best, best_i, best_j, best_bin = singles.free[worst] + _EPSILON, END, END, NONE
    i = singles.head[worst]
    while i != END:
        work, tokens = sequences.work[i], sequences.tokens[i]
        at = singles.slot_tokens[worst, singles.slot_of[i]]
        # The last sequence of a slot takes the slot's fixed seconds along when it leaves.
        alone = inputs.prices.beta if at + tokens == inputs.tokens_per_rank else 0.0
        for k in range(min(bins, _SAMPLE)):
            c = (sample + k * stride) % bins
            # A bin that is as full as that can only end later than the best exchange so far.
            if c == worst or singles.free[c] <= best:
                continue
            evaluations += 1
            score = min(singles.free[worst] + work + alone, singles.free[c] - work)
            if score > best:
                # A move that finds no open slot with room opens one, which costs its bin beta, if one is left.
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
                    # Each slot takes the other's sequence in place of its own: a swap neither opens nor closes one.
                    if _holds(at, -fewer, sequences.tokens[i], inputs) and _holds(left, fewer, tokens - fewer, inputs):
                        best, best_i, best_j, best_bin = score, i, j, c
                j = singles.after[j]
        i = singles.after[i]
    return Exchange(best_i, best_j, best_bin, evaluations)


@inlined
def _holds(left: int, more: int, tokens: int, inputs: PlannerInputs) -> bool:
    """Return whether a slot with so many tokens left takes a sequence of `more` tokens more for one of `tokens`."""
    if more <= 0:
        return True
    # Alone in its slot: what comes in its place is alone, too, and may fill the budget.
    is_alone = left + tokens == inputs.tokens_per_rank
    held_back = 0 if is_alone else max(0, inputs.tokens_per_rank - inputs.shared_tokens)
    return bool(left - more >= held_back)


@leaf
def _exchange(i: int, j: int, c: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Move i to bin c, or swap it with j there."""
    b, slot = singles.bin_of[i], singles.slot_of[i]
    if j == END:
        take(i, sequences, inputs, singles)
        to = slot_with_room(c, sequences.tokens[i], inputs, singles)
        if to == NONE:
            to = closed_slot(c, singles)
        put(i, c, to, sequences, inputs, singles)
        return
    # Both leave before either enters: neither slot has to hold both.
    other = singles.slot_of[j]
    take(i, sequences, inputs, singles)
    take(j, sequences, inputs, singles)
    put(j, b, slot, sequences, inputs, singles)
    put(i, c, other, sequences, inputs, singles)
