"""`sync: iteration`: the smallest target for which rings and sand fit, then balanced."""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.plan.step import Int64Array
from fcp_cli.planning.compiled.compiling import kernel
from fcp_cli.planning.compiled.core import Machine, Sequences
from fcp_cli.planning.compiled.rings import Rings, Timeline, make_rings, make_timeline, place_rings
from fcp_cli.planning.compiled.sand import Sand, balance, fill, make_sand

_MOST_SLOTS = 1 << 26  # of all bins together, 512 MB; more only where the sand itself needs them


@kernel
def _split(target: float, sequences: Sequences, machine: Machine, rings: Rings, sand_order: Int64Array) -> int:
    """Sequences that no single rank can run by target go to rings; the number of rings. The rest is sand."""
    count = 0
    n = 0
    for i in range(len(sequences.work)):
        if sequences.tokens[i] > machine.budget or machine.beta + sequences.work[i] > target:
            rings.sequence[count] = i
            count += 1
        else:
            sand_order[n] = i
            n += 1
    return count


@kernel
def _attempt(
    target: float,
    ride: bool,
    sequences: Sequences,
    machine: Machine,
    timeline: Timeline,
    rings: Rings,
    sand: Sand,
    sand_order: Int64Array,
) -> Any:
    """Lay rings and sand by target.

    Returns:
        How many sequences did not fit, or -1 where a ring did not; the number of rings; that of gaps; the rings.
    """
    count = _split(target, sequences, machine, rings, sand_order)
    gaps, rings = place_rings(target, count, sequences, machine, timeline, rings)
    if gaps < 0:
        return -1, count, 0, rings
    left_over = fill(
        target, sand_order[: len(sequences.work) - count], gaps, count, ride, sequences, machine, timeline, rings, sand
    )
    return left_over, count, gaps, rings


@kernel
def _slots(bins: int, sequences: Sequences, machine: Machine) -> int:
    """Return how many slots each bin of sand gets: enough that `fill` never lacks one in every bin at once.

    A slot is opened only where no open slot of its bin has the tokens, so any two slots of a bin hold more than one
    budget, and all bins together open fewer than 2 x tokens / budget + bins slots. Four times the mean of the ranks,
    and 8, are more than that. No bin can use more slots than there is sand. Where rings hold so many tokens that bins x
    slots would fill the memory, only the tokens of sand count, which keeps it linear in sequences and ranks.
    """
    sand, sand_tokens = 0, 0
    for i in range(len(sequences.tokens)):
        if sequences.tokens[i] <= machine.budget:
            sand += 1
            sand_tokens += sequences.tokens[i]
    all_ranks = machine.num_ranks * machine.budget
    slots = int(4 * (sequences.tokens.sum() / all_ranks)) + 8
    return int(min(slots, sand + 1, max(_MOST_SLOTS // bins, int(4 * (sand_tokens / all_ranks)) + 8)))


@kernel
def schedule(lower: float, ride: bool, work_limit: int, sequences: Sequences, machine: Machine) -> Any:
    """The best schedule found: (rings, number of rings, sand, gaps, timeline)."""
    n = len(sequences.work)
    bins = machine.num_ranks + min(4 * machine.num_ranks, n)
    timeline = make_timeline(machine.num_ranks, bins - machine.num_ranks)
    rings = make_rings(n, machine.num_ranks)
    sand = make_sand(n, bins, _slots(bins, sequences, machine), n)
    sand_order = np.zeros(n, dtype=np.int64)
    gap, infeasible = 0.002, 0.0
    while True:
        left_over, count, gaps, rings = _attempt(
            lower * (1.0 + gap), ride, sequences, machine, timeline, rings, sand, sand_order
        )
        if left_over == 0:
            break
        infeasible = gap
        gap *= 2.0
    while gap - infeasible > 0.0005:
        middle = 0.5 * (gap + infeasible)
        left_over, count, gaps, rings = _attempt(
            lower * (1.0 + middle), ride, sequences, machine, timeline, rings, sand, sand_order
        )
        if left_over == 0:
            gap = middle
        else:
            infeasible = middle
    best, best_target = np.inf, 0.0
    for k in range(4):
        target = lower * (1.0 + gap * (1.0 - k / 4.0))
        left_over, count, gaps, rings = _attempt(target, ride, sequences, machine, timeline, rings, sand, sand_order)
        if left_over < 0:
            break
        end = balance(target, gaps, work_limit, sequences, machine, sand)
        if end < best:
            best, best_target = end, target
    left_over, count, gaps, rings = _attempt(best_target, ride, sequences, machine, timeline, rings, sand, sand_order)
    end = balance(best_target, gaps, work_limit, sequences, machine, sand)
    return rings, count, sand, gaps, timeline
