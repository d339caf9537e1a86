"""`sync: iteration`: the smallest target for which rings and single-rank packs fit, then balanced.

`schedule` knows a target that nothing can beat, and looks for the smallest one above it that works:

    if a step is known already: end unless its seconds may be beaten
    double the gap to the lower bound until everything fits            _attempt
    bisect between the last gap that did not fit and the first that did
    try that target and three lower ones, in which some sequences end late;
        balance each, and keep the one that then ends first            balancing.balance
    lay it once more, and balance it

An attempt for one target:

    sequences that no single rank can run by then become rings         _split
    rings take ranks on the timelines                                  rings.place_rings
    all else is single-rank work, laid into the time that rings leave  single_rank_packs.fill
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling.compile import kernel, leaf
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences, total_of
from fcp_cli.planning.compiled.timelines.balancing import balance
from fcp_cli.planning.compiled.timelines.rings import Rings, Timeline, make_rings, make_timeline, place_rings
from fcp_cli.planning.compiled.timelines.single_rank_packs import SingleRankPacks, fill, make_single_rank_packs

_ALIKE = 2e-4  # relative; a part of a step that ends by so much later than another is not planned again
_MOST_SLOTS = 1 << 26  # of all bins together, 512 MB; more only if the packs themselves need them


@leaf
def _split(target: float, sequences: Sequences, inputs: PlannerInputs, rings: Rings, single_order: IntArray) -> int:
    """Make rings of the sequences that no single rank can run by target; return how many are left, in single_order."""
    count = 0
    n = 0
    for i in range(len(sequences.work)):
        # Only sequences that need one: a ring costs its ranks communication and a micro-batch each.
        if sequences.tokens[i] > inputs.tokens_per_rank or inputs.prices.beta + sequences.work[i] > target:
            rings.sequence[count] = i
            count += 1
        else:
            single_order[n] = i
            n += 1
    # In an array of one, since arrays are passed by reference and numbers are not.
    rings.placed[0] = count
    return n


@kernel
def _attempt(
    target: float,
    sequences: Sequences,
    inputs: PlannerInputs,
    timeline: Timeline,
    rings: Rings,
    singles: SingleRankPacks,
    single_order: IntArray,
) -> int:
    """Lay rings, then single-rank work; return how many sequences end too late, or -1 if a ring does not fit."""
    n = _split(target, sequences, inputs, rings, single_order)
    if not place_rings(target, sequences, inputs, timeline, rings):
        return -1
    return int(fill(target, single_order[:n], sequences, inputs, timeline, rings, singles))


@leaf
def _slots(bins: int, sequences: Sequences, inputs: PlannerInputs) -> int:
    """Return how many slots each bin gets: enough that `fill` never lacks one in every bin at once.

    A slot is opened only if no open slot of its bin has the tokens, so any two slots of a bin hold more than one
    budget, that of sequences which share one, and all bins together open fewer than 2 x tokens / budget + bins slots.
    Four times the mean of the ranks, and 8, are more than that. No bin can use more slots than there are single-rank
    sequences. If rings hold so many tokens that bins x slots would fill the memory, only the tokens of those count: it
    stays linear in sequences and ranks.
    """
    # Only sequences that may run on a single rank can have a slot.
    singles, single_tokens = 0, 0
    for i in range(len(sequences.tokens)):
        if sequences.tokens[i] <= inputs.tokens_per_rank:
            singles += 1
            single_tokens += sequences.tokens[i]
    # By the tokens that may share a slot, which are the fewer.
    step_tokens = inputs.num_ranks * min(inputs.shared_tokens, inputs.tokens_per_rank)
    slots = int(4 * (total_of(sequences.tokens) / step_tokens)) + 8
    return int(min(slots, singles + 1, max(_MOST_SLOTS // bins, int(4 * (single_tokens / step_tokens)) + 8)))


@kernel
def schedule(lower: float, limit: float, work_limit: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the best schedule found: rings, single-rank packs and timelines; its target and its end.

    The target is 0 if rings and packs do not fit by the limit.

    Args:
        lower: seconds that no schedule can beat.
        limit: seconds of a step that is known, or infinite; only a quicker one is of interest.
        work_limit: comparisons of each balancing.
        sequences: the sequences by falling work.
        inputs: the ranks and their prices.
    """
    n = len(sequences.work)
    # Waits beyond the space for them are lost to planning, so that memory stays linear in ranks.
    bins = inputs.num_ranks + min(4 * inputs.num_ranks, n)
    timeline = make_timeline(inputs.num_ranks, bins - inputs.num_ranks)
    rings = make_rings(n)
    singles = make_single_rank_packs(bins, _slots(bins, sequences, inputs), sequences, inputs)
    single_order = np.zeros(n, dtype=np.int64)
    if limit < np.inf:
        late = _attempt(limit, sequences, inputs, timeline, rings, singles, single_order)
        # What does not fit by the limit hardly fits sooner.
        if late != 0:
            return rings, singles, timeline, 0.0, 0.0
    # The gap to the lower bound that fits, and the largest known not to. All ends late enough fit, so this ends.
    # It begins small and doubles: an attempt far above the first fit would build a poor step.
    gap, infeasible = 0.002, 0.0
    while True:
        late = _attempt(lower * (1.0 + gap), sequences, inputs, timeline, rings, singles, single_order)
        if late == 0:
            break
        infeasible = gap
        gap *= 2.0
    # A twentieth of a percent: what a finer target could gain is left to the lower targets below, and to balancing.
    while gap - infeasible > 0.0005:
        middle = 0.5 * (gap + infeasible)
        late = _attempt(lower * (1.0 + middle), sequences, inputs, timeline, rings, singles, single_order)
        if late == 0:
            gap = middle
        else:
            infeasible = middle
    # Under a lower target some sequences end late at first; balancing may yet let their ranks end in time.
    best, best_target = np.inf, 0.0
    for k in range(4):
        target = lower * (1.0 + gap * (1.0 - k / 4.0))
        late = _attempt(target, sequences, inputs, timeline, rings, singles, single_order)
        if late < 0:
            break  # lower targets make rings wider still
        end = balance(target, timeline.gaps[0], work_limit, sequences, inputs, singles)
        if end < best:
            best, best_target = end, target
    # The arrays hold the last attempt: to run the best one again is cheaper than a copy of each quicker one.
    late = _attempt(best_target, sequences, inputs, timeline, rings, singles, single_order)
    balance(best_target, timeline.gaps[0], work_limit, sequences, inputs, singles)
    return rings, singles, timeline, best_target, best


@kernel
def follow(target: float, end: float, work_limit: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the schedule of a part whose search is skipped: it takes the target that `schedule` found for a like part.

    If this part ends later than that one with this target, later targets are tried, until all its sequences end by
    their target. The best schedule is returned, as its rings, single-rank packs and timelines.

    Args:
        target, end: the target and the end that `schedule` returned for the other part, in seconds.
        work_limit, sequences, inputs: as in `schedule`.
    """
    n = len(sequences.work)
    bins = inputs.num_ranks + min(4 * inputs.num_ranks, n)
    timeline = make_timeline(inputs.num_ranks, bins - inputs.num_ranks)
    rings = make_rings(n)
    singles = make_single_rank_packs(bins, _slots(bins, sequences, inputs), sequences, inputs)
    single_order = np.zeros(n, dtype=np.int64)
    best, best_target, step, late = np.inf, target, 0.0, -1
    while best > end * (1.0 + _ALIKE) and late != 0:
        tried = target * (1.0 + step)
        late = _attempt(tried, sequences, inputs, timeline, rings, singles, single_order)
        if late >= 0:
            reached = balance(tried, timeline.gaps[0], work_limit, sequences, inputs, singles)
            if reached < best:
                best, best_target = reached, tried
        step = 2.0 * step + 0.0005
    if best_target != tried:
        _attempt(best_target, sequences, inputs, timeline, rings, singles, single_order)
        balance(best_target, timeline.gaps[0], work_limit, sequences, inputs, singles)
    return rings, singles, timeline
