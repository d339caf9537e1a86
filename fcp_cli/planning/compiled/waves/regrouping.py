"""`sync: microbatch`: two waves of a planned step at a time, planned again as a step of their own.

    order waves by waste: their seconds beyond their work shared evenly
    for pairs of waves, neighbours in that order first:
        search for at most two waves of their sequences that take less            microbatch.search
        replace the two by the answer, and order the waves again

A pair of w waves takes some 4 / w^2 of the time of a search of the whole step: all pairs take as long as two. The
search ends after some dozens of pairs in a row that nothing beats.
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

_MARGIN = 1e-9  # relative; seconds that differ by less are equal but for rounding


class Places(NamedTuple):
    """Groups of neighbouring ranks that run the sequences of a step.

    Attributes:
        wave, degree, first: [sequences] wave of each sequence, degree and first rank of its group.
        head: [waves] first sequence of each wave, -1 if it has none.
        after: [sequences] next sequence of the same wave, by position; -1 after the last.
    """

    wave: IntArray
    degree: IntArray
    first: IntArray
    head: IntArray
    after: IntArray


@leaf
def _enter(i: int, wave: int, places: Places) -> None:
    """Enter a sequence into a wave whose other sequences all stand behind it."""
    places.wave[i], places.after[i], places.head[wave] = wave, places.head[wave], i


@kernel
def _seconds_of(wave: int, places: Places, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the seconds of a wave, and those beyond its work shared evenly; none of a wave without sequences."""
    # By first rank, which no two groups of a wave share.
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
    # Both lists ascend: merged, they are by falling work, as the search expects its sequences.
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
    """Plan the sequences of two waves again; return whether they take less than the limit now."""
    members = _members_of(one, other, places)
    own = Sequences(
        sequences.attention[members], sequences.linear[members], sequences.work[members], sequences.tokens[members]
    )
    _seconds, targets, widths = search(limit, tries, fills, own, inputs)
    # Only two waves have a place in the step.
    if not 0 < len(targets) <= 2:
        return False
    written, _groups, _left = replay(targets, widths, own, inputs)
    places.head[one] = places.head[other] = -1
    # Backwards, so that the lists of both waves ascend.
    for k in range(len(members) - 1, -1, -1):
        i, group = members[k], written.group_of[k]
        _enter(i, other if written.wave[group] else one, places)
        places.degree[i], places.first[i] = written.degree[group], written.first[group]
    return True


@kernel
def regroup(
    patience: int, tries: int, fills: int, places: Places, sequences: Sequences, inputs: PlannerInputs
) -> float:
    """Plan pairs of waves again, in place; a wave may be left without sequences.

    Args:
        patience: pairs in a row that may stay as they are before the search ends.
        tries, fills: see `microbatch.search`.
        places: what runs where; `head` and `after` need not be set.
        sequences, inputs: the sequences by falling work, and the ranks.

    Returns:
        The seconds by which the step ends sooner.
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
        # Emptied by an earlier pair: the other one would be planned by itself.
        if min(seconds[one], seconds[other]) == 0.0:
            continue
        if _replan(one, other, limit, tries, fills, places, sequences, inputs):
            seconds[one], waste[one] = _seconds_of(one, places, sequences, inputs)
            seconds[other], waste[other] = _seconds_of(other, places, sequences, inputs)
            order, kept = falling_order(waste), 0
    return float(before - total_of(seconds))
