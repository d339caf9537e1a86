"""Orders of the waves of a pipelined step.

While the longest micro-batch passes through the pipeline and back, the first stage runs forwards of later micro-batches
and backwards of earlier ones. The step therefore pays at least the forward of each earlier micro-batch and the backward
of each later one. More of them belong before the longest than after it, with the long ones next to it and the short
ones at both ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.plan.step import offsets_of, sizes_of
from fcp_cli.planning.problem import Assignment, Problem
from fcp_cli.simulation.layout import ORDERS, parts_of, places


def wave_orders(waves: Assignment, seconds: FloatArray, problem: Problem) -> Iterator[IntArray]:
    """Yield other orders of the same waves, as [microbatches] the new wave of each.

    Every order rises to the longest wave, then falls; the orders differ in the waves after the longest. Ranks that no
    ring connects are ordered independently. Under `iteration`, waves in which some rank has no work stay last: anywhere
    else, replicas could wait for each other in a cycle.

    Args:
        waves: a step.
        seconds: [microbatches] of each.
        problem: the problem of the step.
    """
    count = int(waves.wave.max()) + 1
    degrees = sizes_of(waves.rank_offsets)
    parts = parts_of(problem.num_ranks, waves.rank_offsets, waves.ranks)
    part = parts[waves.ranks[waves.rank_offsets[:-1]]]
    # [parts, waves]: parts are sets of ranks that no ring connects to others.
    lasts = np.zeros((int(parts.max()) + 1, count))
    np.maximum.at(lasts, (part, waves.wave), seconds)
    held = np.zeros(lasts.shape, dtype=np.int64)
    np.add.at(held, (part, waves.wave), degrees)
    is_whole = (
        held == np.bincount(parts)[:, None] if problem.sync == "iteration" else np.ones_like(held, dtype=np.bool_)
    )
    # The caller simulates each order, which costs far more than this comparison.
    known = {waves.wave.astype(np.int64).tobytes()}
    for kind in range(ORDERS):
        place = places(kind, lasts, is_whole)[part, waves.wave]
        if place.tobytes() not in known:
            known.add(place.tobytes())
            yield place


def reordered(assignment: Assignment, place: IntArray) -> Assignment:
    """Return the assignment with its micro-batches moved to the waves `place`."""
    order = np.argsort(place, kind="stable")
    ranks, degrees = _taken(assignment.ranks.astype(np.int64), assignment.rank_offsets, order)
    members, sizes = _taken(assignment.members, assignment.member_offsets, order)
    return Assignment(
        wave=place[order].astype(np.int32),
        rank_offsets=degrees,
        ranks=ranks.astype(np.int32),
        member_offsets=sizes,
        members=members,
    )


def _taken(values: IntArray, offsets: IntArray, order: IntArray) -> tuple[IntArray, IntArray]:
    """Return back-to-back lists in another order, and their new offsets."""
    sizes = sizes_of(offsets)[order]
    new = offsets_of(sizes)
    # Vectorized gather: old position = new position + (old start - new start) of its list.
    return values[np.repeat(offsets[:-1][order] - new[:-1], sizes) + np.arange(new[-1])], new
