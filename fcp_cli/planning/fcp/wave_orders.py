"""Puts the waves of a step of pipelines into other orders.

While the longest micro-batch of a pipeline goes there and back, its first device runs forwards of those behind it and
backwards of those before it. So of each one before, the step pays the forward at least, and of each one behind the
backward: more belong before than behind, the longer ones next to the longest, and short ones to both ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.plan.step import offsets_of, sizes_of
from fcp_cli.planning.problem import Assignment, Problem
from fcp_cli.simulation.layout import ORDERS, parts_of, places


def wave_orders(waves: Assignment, seconds: FloatArray, problem: Problem) -> Iterator[IntArray]:
    """Yield [microbatches] places that put the same waves into other orders: rising to the longest, then falling.

    The orders differ in the groups after the longest. Ranks outside rings have their own order. Where
    ranks may have unlike numbers of micro-batches, waves that lack some rank stay behind the others: in another place
    they would leave replicas waiting for each other in a circle.

    Args:
        waves: a step.
        seconds: [microbatches] of each.
        problem: the problem that it is planned for.
    """
    count = int(waves.wave.max()) + 1
    degrees = sizes_of(waves.rank_offsets)
    parts = parts_of(problem.num_ranks, waves.rank_offsets, waves.ranks)
    part = parts[waves.ranks[waves.rank_offsets[:-1]]]
    # [parts, waves]: ranks that no ring joins to others are ordered by themselves.
    lasts = np.zeros((int(parts.max()) + 1, count))
    np.maximum.at(lasts, (part, waves.wave), seconds)
    held = np.zeros(lasts.shape, dtype=np.int64)
    np.add.at(held, (part, waves.wave), degrees)
    is_whole = (
        held == np.bincount(parts)[:, None] if problem.sync == "iteration" else np.ones_like(held, dtype=np.bool_)
    )
    # A timeline is run for each order, which costs far more than to compare the places.
    known = {waves.wave.astype(np.int64).tobytes()}
    for kind in range(ORDERS):
        place = places(kind, lasts, is_whole)[part, waves.wave]
        if place.tobytes() not in known:
            known.add(place.tobytes())
            yield place


def reordered(assignment: Assignment, place: IntArray) -> Assignment:
    """Return the micro-batches by these places, which become their waves."""
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
    """Return lists that lie back to back in another order, and their new offsets."""
    sizes = sizes_of(offsets)[order]
    new = offsets_of(sizes)
    # A gather without a loop: place i of a list is i behind its old start, counted on from its new one.
    return values[np.repeat(offsets[:-1][order] - new[:-1], sizes) + np.arange(new[-1])], new
