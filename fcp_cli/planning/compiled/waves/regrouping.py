"""`sync: microbatch`: replanning of a step's waves, two at a time.

    order waves by waste: their seconds beyond their evenly shared work
    for pairs of waves, neighbours in that order first:
        search at most two waves for their sequences that take less               microbatch.search
        if found, replace the pair and order the waves again

Replanning one pair of w waves takes about 4 / w^2 of the time of searching the whole step, so all pairs together take
as long as two searches. It ends after some dozens of consecutive pairs without a gain.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.compiling.compile import kernel, leaf
from fcp_cli.planning.compiled.core import (
    PlannerInputs,
    Sequences,
    across_of,
    enter_load,
    falling_order,
    load_at,
    make_loads,
    pack_seconds,
    padded_load,
    together,
    total_of,
)
from fcp_cli.planning.compiled.waves.microbatch import replay, search

_MARGIN = 1e-9  # relative; seconds that differ by less are equal up to rounding


class Places(NamedTuple):
    """The wave and the group of neighbouring ranks of each sequence of a step.

    Attributes:
        wave, degree, first: [sequences] wave of each sequence; degree and first rank of its group.
        head: [waves] first sequence of each wave, -1 if it has none.
        after: [sequences] next sequence of the same wave, by rising position; -1 after the last.
    """

    wave: IntArray
    degree: IntArray
    first: IntArray
    head: IntArray
    after: IntArray


@leaf
def _enter(i: int, wave: int, places: Places) -> None:
    """Insert a sequence at the head of a wave; all its other sequences must have higher positions."""
    places.wave[i], places.after[i], places.head[wave] = wave, places.head[wave], i


@kernel
def _seconds_of(wave: int, places: Places, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the seconds of a wave, and its waste: the seconds beyond its evenly shared work; 0 for an empty wave."""
    # Indexed by first rank, which identifies a group of a wave.
    loads, degrees = make_loads(inputs.num_ranks), np.zeros(inputs.num_ranks, dtype=np.int64)
    work, seconds, i = 0.0, inputs.floor, places.head[wave]
    if i < 0:
        return 0.0, 0.0
    while i >= 0:
        first = places.first[i]
        degrees[first] = places.degree[i]
        load = padded_load(i, degrees[first], sequences, inputs)
        enter_load(first, together(load_at(first, loads), load), loads)
        work += sequences.work[i]
        i = places.after[i]
    for first in range(inputs.num_ranks):
        if degrees[first]:
            across = across_of(first, degrees[first], inputs)
            seconds = max(seconds, pack_seconds(load_at(first, loads), degrees[first], across, inputs))
    return seconds, seconds - work / inputs.num_ranks


@kernel
def _members_of(one: int, other: int, places: Places) -> IntArray:
    """Return the positions of the sequences of two waves, ascending."""
    found, count = np.zeros(len(places.after), dtype=np.int64), 0
    # Merge two ascending lists; positions are by falling work, the order that the search expects.
    i, j = places.head[one], places.head[other]
    while i >= 0 or j >= 0:
        if j < 0 or 0 <= i < j:
            found[count], i = i, places.after[i]
        else:
            found[count], j = j, places.after[j]
        count += 1
    return found[:count]


@kernel
def _replan(
    one: int,
    other: int,
    limit: float,
    tries: int,
    fills: int,
    places: Places,
    sequences: Sequences,
    inputs: PlannerInputs,
) -> bool:
    """Replan the sequences of two waves, in place; return False if no plan takes less than the limit."""
    members = _members_of(one, other, places)
    own = Sequences(
        sequences.attention[members], sequences.linear[members], sequences.work[members], sequences.tokens[members]
    )
    _seconds, targets, widths = search(limit, tries, fills, own, inputs)
    # More than two waves cannot replace a pair.
    if not 0 < len(targets) <= 2:
        return False
    written, _groups, _left = replay(targets, widths, own, inputs)
    places.head[one] = places.head[other] = -1
    # Backwards, since `_enter` inserts at the head.
    for k in range(len(members) - 1, -1, -1):
        i, group = members[k], written.group_of[k]
        _enter(i, other if written.wave[group] else one, places)
        places.degree[i], places.first[i] = written.degree[group], written.first[group]
    return True


@kernel
def regroup(
    patience: int, tries: int, fills: int, places: Places, sequences: Sequences, inputs: PlannerInputs
) -> float:
    """Replan pairs of waves, in place; a wave may end up empty.

    Args:
        patience: consecutive pairs without a gain after which the search ends.
        tries, fills: see `microbatch.search`.
        places: the step; `head` and `after` need not be set.
        sequences, inputs: the sequences by falling work, and the ranks.

    Returns:
        The seconds gained.
    """
    waves = len(places.head)
    places.head[:] = -1
    for i in range(len(places.after) - 1, -1, -1):
        _enter(i, places.wave[i], places)
    seconds, waste = np.zeros(waves), np.zeros(waves)
    for wave in range(waves):
        seconds[wave], waste[wave] = _seconds_of(wave, places, sequences, inputs)
    before = total_of(seconds)
    order, distance, at, kept = falling_order(waste), 1, 0, 0
    while kept < patience:
        if at + distance >= waves:
            distance, at = distance + 1, 0
        if distance >= waves:
            break
        one, other = order[at], order[at + distance]
        at, kept = at + 1, kept + 1
        limit = (seconds[one] + seconds[other]) * (1.0 - _MARGIN)
        # Skip a wave that an earlier pair emptied: the other one would be replanned alone.
        if min(seconds[one], seconds[other]) == 0.0:
            continue
        if _replan(one, other, limit, tries, fills, places, sequences, inputs):
            seconds[one], waste[one] = _seconds_of(one, places, sequences, inputs)
            seconds[other], waste[other] = _seconds_of(other, places, sequences, inputs)
            order, kept = falling_order(waste), 0
    return float(before - total_of(seconds))
