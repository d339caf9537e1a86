"""`sync: iteration`: the smallest target for which rings and sand fit, then balanced.

`schedule` knows a target that nothing can beat, and looks for the smallest one above it that works:

    where a step is known already: end unless its seconds may be beaten
    double the gap to the lower bound until everything fits            _attempt
    bisect between the last gap that did not fit and the first that did
    try that target and three lower ones, where some sequences end late;
        balance each, and keep the one that then ends first            sand.balance
    lay it once more, and balance it

An attempt for one target:

    sequences that no single rank can run by then become rings         _split
    rings take ranks on the timelines                                  rings.place_rings
    all else is sand, laid into the time that rings leave              sand.fill
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling import kernel, leaf
from fcp_cli.planning.compiled.core import Machine, Sequences, total_of
from fcp_cli.planning.compiled.rings import Rings, Timeline, make_rings, make_timeline, place_rings
from fcp_cli.planning.compiled.sand import Sand, balance, fill, make_sand

_MOST_SLOTS = 1 << 26  # of all bins together, 512 MB; more only where the sand itself needs them


@leaf
def _split(target: float, sequences: Sequences, machine: Machine, rings: Rings, sand_order: IntArray) -> int:
    """Make rings of the sequences that no single rank can run by target; return how many are left, in sand_order."""
    count = 0
    n = 0
    for i in range(len(sequences.work)):
        if sequences.tokens[i] > machine.tokens_per_rank or machine.prices.beta + sequences.work[i] > target:
            rings.sequence[count] = i
            count += 1
        else:
            sand_order[n] = i
            n += 1
    rings.placed[0] = count
    return n


@kernel
def _attempt(
    target: float,
    ride: bool,
    sequences: Sequences,
    machine: Machine,
    timeline: Timeline,
    rings: Rings,
    sand: Sand,
    sand_order: IntArray,
) -> int:
    """Lay rings and sand by target; return how many sequences end too late, or -1 if a ring does not fit."""
    n = _split(target, sequences, machine, rings, sand_order)
    if not place_rings(target, sequences, machine, timeline, rings):
        return -1
    return int(fill(target, sand_order[:n], ride, sequences, machine, timeline, rings, sand))


@leaf
def _slots(bins: int, sequences: Sequences, machine: Machine) -> int:
    """Return how many slots each bin of sand gets: enough that `fill` never lacks one in every bin at once.

    A slot is opened only where no open slot of its bin has the tokens, so any two slots of a bin hold more than one
    budget, and all bins together open fewer than 2 x tokens / budget + bins slots. Four times the mean of the ranks,
    and 8, are more than that. No bin can use more slots than there is sand. Where rings hold so many tokens that bins x
    slots would fill the memory, only the tokens of sand count, which keeps it linear in sequences and ranks.
    """
    sand, sand_tokens = 0, 0
    for i in range(len(sequences.tokens)):
        if sequences.tokens[i] <= machine.tokens_per_rank:
            sand += 1
            sand_tokens += sequences.tokens[i]
    step_tokens = machine.num_ranks * machine.tokens_per_rank
    slots = int(4 * (total_of(sequences.tokens) / step_tokens)) + 8
    return int(min(slots, sand + 1, max(_MOST_SLOTS // bins, int(4 * (sand_tokens / step_tokens)) + 8)))


@kernel
def schedule(lower: float, limit: float, ride: bool, work_limit: int, sequences: Sequences, machine: Machine) -> Any:
    """Return the best schedule found: rings, sand and timelines; and whether it is worth a look.

    It is not where rings and sand do not fit by the limit.

    Args:
        lower: seconds that no schedule can beat.
        limit: seconds of a step that is known, or infinite; only a quicker one is of interest.
        ride: whether short sequences may ride in rings.
        work_limit: comparisons of each balancing.
        sequences: by falling work.
        machine: the ranks and their prices.
    """
    n = len(sequences.work)
    bins = machine.num_ranks + min(4 * machine.num_ranks, n)
    timeline = make_timeline(machine.num_ranks, bins - machine.num_ranks)
    rings = make_rings(n)
    sand = make_sand(n, bins, _slots(bins, sequences, machine), n)
    sand_order = np.zeros(n, dtype=np.int64)
    if limit < np.inf:
        late = _attempt(limit, ride, sequences, machine, timeline, rings, sand, sand_order)
        if late != 0:
            return rings, sand, timeline, False
    # The gap to the lower bound that fits, and the largest known not to. All ends late enough fit, so this ends.
    # It begins small and doubles: an attempt far above the first fit would lay a step that nobody wants.
    gap, infeasible = 0.002, 0.0
    while True:
        late = _attempt(lower * (1.0 + gap), ride, sequences, machine, timeline, rings, sand, sand_order)
        if late == 0:
            break
        infeasible = gap
        gap *= 2.0
    while gap - infeasible > 0.0005:
        middle = 0.5 * (gap + infeasible)
        late = _attempt(lower * (1.0 + middle), ride, sequences, machine, timeline, rings, sand, sand_order)
        if late == 0:
            gap = middle
        else:
            infeasible = middle
    # Under a lower target some sequences end late at first; balancing may yet let their ranks end in time.
    best, best_target = np.inf, 0.0
    for k in range(4):
        target = lower * (1.0 + gap * (1.0 - k / 4.0))
        late = _attempt(target, ride, sequences, machine, timeline, rings, sand, sand_order)
        if late < 0:
            break  # lower targets make rings wider still
        end = balance(target, timeline.gaps[0], work_limit, sequences, machine, sand)
        if end < best:
            best, best_target = end, target
    # The arrays hold the last attempt: to run the best one again is cheaper than a copy of each quicker one.
    late = _attempt(best_target, ride, sequences, machine, timeline, rings, sand, sand_order)
    balance(best_target, timeline.gaps[0], work_limit, sequences, machine, sand)
    return rings, sand, timeline, True
