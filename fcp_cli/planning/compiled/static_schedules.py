"""A whole step on a single degree, as `static` plans it: packing, dealing to groups, and the search of the best degree.

No array overflows: there are at most as many packs as sequences, and num_ranks // degree groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.certificate import alone_at_best, at_best
from fcp_cli.planning.compiled.core import (
    NONE,
    PlannerInputs,
    Sequences,
    across_of,
    common_divisor,
    enter_load,
    falling_order,
    least_of_packs,
    load_at,
    make_loads,
    most_of,
    pack_seconds,
    padded_load,
    sequence_load,
    together,
    total_of,
)
from fcp_cli.planning.compiled.room_tree import first_with_room, make_tree, roomiest, set_room
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel

FULL, EVEN, LEVEL = 0, 1, 2  # packings; see `packed`
_EXCHANGES = 300_000  # pairs of sequences compared per degree
_LEVEL_ENOUGH = 1e-4  # relative excess of the busiest group over the mean at which balancing stops
_HIDING = 4  # weights h of `least_of_packs` tried between 0 and 1
_MARGIN = 1e-9  # relative rounding error of a bound


class Packs(NamedTuple):
    """Sequences in packs.

    Attributes:
        of: [sequences] pack of each sequence.
        number: number of packs.
        group_of: [packs] group of each pack; empty if packs have no groups yet.
    """

    of: IntArray
    number: int
    group_of: IntArray


@kernel
def quickest(seconds: float, degrees: IntArray, waves: bool, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return seconds, degree and packing of the fastest step on a single degree; degree 0 if none beats `seconds`.

    A degree is skipped if a lower bound from its work or its longest sequence is not below the best so far.
    """
    best_degree, best_packing = 0, FULL
    by_tokens = longest_first(sequences)
    attention, linear, tokens = total_of(sequences.attention), total_of(sequences.linear), total_of(sequences.tokens)
    for degree in degrees:
        group_tokens = degree * inputs.tokens_per_rank
        if sequences.tokens[by_tokens[0]] > group_tokens:
            continue
        least = _at_least(degree, attention, linear, tokens, inputs)
        least = max(least, alone_at_best(by_tokens[0], degree, sequences, inputs))
        if least * (1.0 - _MARGIN) >= seconds:
            continue
        padded, longest = sequences, by_tokens
        if inputs.padding:
            padded = _padded_for_all(degree, sequences, inputs)
            longest = longest_first(padded)
        for packing in (FULL, EVEN, LEVEL):
            packs = packed(packing, degree, waves, longest, padded, inputs)
            if packs.number == 0:
                continue
            found, _by, _group_of, _turn_of = share_out(degree, waves, packs, padded, inputs)
            if found < seconds:
                seconds, best_degree, best_packing = found, degree, packing
    return seconds, best_degree, best_packing


@inlined
def _at_least(degree: int, attention: float, linear: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return a lower bound of a step on a single degree: all groups always busy, with full packs."""
    packs = max(1.0, tokens / (degree * inputs.tokens_per_rank))
    # Every weight gives a valid bound, so take the largest.
    overlapped = 0.0 if degree > 1 else attention
    for step in range(_HIDING + 1 if degree > 1 else 0):
        hiding = step / _HIDING
        least = least_of_packs(hiding, tokens, packs, degree, at_best(degree, inputs), inputs)
        overlapped = max(overlapped, hiding * attention / degree + least)
    # All packs in sequence on one group, shared evenly by num_ranks / degree groups.
    return (inputs.prices.beta * packs + linear / degree + overlapped) * degree / inputs.num_ranks


@kernel
def laid_out(packing: int, degree: int, waves: bool, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Pack sequences that are padded for this degree and deal the packs; fall back to FULL if even packs overflow.

    Returns:
        The packs, and the arrays of `share_out` without the seconds.
    """
    by_tokens = longest_first(sequences)
    packs = packed(packing, degree, waves, by_tokens, sequences, inputs)
    if packs.number == 0:
        packs = packed(FULL, degree, waves, by_tokens, sequences, inputs)
    _seconds, by, group_of, turn_of = share_out(degree, waves, packs, sequences, inputs)
    return packs, by, group_of, turn_of


@kernel
def packed(
    packing: int, degree: int, waves: bool, by_tokens: IntArray, sequences: Sequences, inputs: PlannerInputs
) -> Any:
    """Pack sequences that are padded for this degree; return 0 packs if EVEN overflows one.

    FULL fills packs up, EVEN spreads tokens evenly over packs, LEVEL spreads work over the groups first.
    """
    group_tokens = degree * inputs.tokens_per_rank
    if packing == LEVEL:
        return level_packs(degree, waves, group_tokens, sequences, inputs)
    pack_of, count = full_packs(group_tokens, by_tokens, sequences)
    if packing == EVEN:
        count = even_count(count, inputs.num_ranks // degree)
        pack_of, count = even_packs(count, group_tokens, by_tokens, sequences)
    return Packs(pack_of, count, np.empty(0, dtype=np.int64))


@kernel
def longest_first(sequences: Sequences) -> IntArray:
    """Return [sequences] the positions by falling tokens, ties by position."""
    return falling_order(sequences.tokens)


@kernel
def full_packs(group_tokens: int, by_tokens: IntArray, sequences: Sequences) -> Any:
    """Pack first-fit decreasing; return [sequences] the pack of each sequence, and the number of packs."""
    pack_of = np.empty(len(by_tokens), dtype=np.int64)
    # At most one pack per sequence. Packs not opened yet have -inf seconds, so no search finds them.
    tree, count = make_tree(len(by_tokens)), 0
    leaf = len(tree.tokens) >> 1
    for i in by_tokens:
        pack = first_with_room(tree, 0.0, sequences.tokens[i], 0)
        room = group_tokens
        if pack == NONE:
            pack = count
            count += 1
        else:
            room = tree.tokens[leaf + pack]
        pack_of[i] = pack
        set_room(tree, pack, 0.0, room - sequences.tokens[i])
    return pack_of, count


@kernel
def even_count(packs: int, groups: int) -> int:
    """Round the number of packs up to a multiple of `groups`."""
    return -(-packs // groups) * groups


@kernel
def even_packs(packs: int, group_tokens: int, by_tokens: IntArray, sequences: Sequences) -> Any:
    """Pack longest first, each into the pack with fewest tokens; return as `full_packs`, 0 packs if one overflows."""
    pack_of = np.empty(len(by_tokens), dtype=np.int64)
    tree = make_tree(packs)
    leaf = len(tree.seconds) >> 1
    # Negated tokens in the field of the seconds, so that `roomiest` finds the emptiest pack.
    for pack in range(packs):
        set_room(tree, pack, 0.0, 0)
    for i in by_tokens:
        pack = roomiest(tree)
        left = tree.seconds[leaf + pack] - sequences.tokens[i]
        # If the emptiest pack has no room, no pack has.
        if -left > group_tokens:
            return pack_of, 0
        pack_of[i] = pack
        set_room(tree, pack, left, 0)
    # `roomiest` breaks ties to the left, so packs are opened in order and any empty ones are the last.
    return pack_of, min(packs, len(by_tokens))


@kernel
def level_packs(degree: int, waves: bool, group_tokens: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Spread the sequences over the groups by work, then those of each group over as few packs as its tokens need.

    As verl balances (`published.karmarkar_karp`), but greedily: heaviest first, to the group with the least work. Under
    waves all groups have equally many packs of similar work.

    Returns:
        The packs, with their groups.
    """
    groups = inputs.num_ranks // degree
    by_work = falling_order(sequences.work)
    group_of, load = np.empty(len(by_work), dtype=np.int64), np.zeros(groups)
    room = make_tree(groups)
    for group in range(groups):
        set_room(room, group, 0.0, 0)
    for i in by_work:
        group = roomiest(room)
        group_of[i] = group
        load[group] += sequences.work[i]
        set_room(room, group, -load[group], 0)
    # Greedy dealing leaves groups up to one sequence apart; exchanges level them.
    _exchange(load, group_of, sequences)
    held = np.zeros(groups, dtype=np.int64)
    for i in by_work:
        held[group_of[i]] += sequences.tokens[i]
    counts = np.empty(groups, dtype=np.int64)
    for group in range(groups):
        counts[group] = -(-held[group] // group_tokens)
    pack_of = np.empty(len(by_work), dtype=np.int64)
    # Packing by work may fail with the least number of packs: retry with one more for that group. This terminates,
    # since one pack per sequence always suffices.
    while True:
        if waves:
            most = most_of(counts)
            for group in range(groups):
                counts[group] = most
        failed = _pack_level(group_tokens, by_work, group_of, counts, pack_of, sequences)
        if failed == NONE:
            break
        counts[failed] += 1
    # Drop empty packs.
    packs = total_of(counts)
    number, group_of_pack, used = np.zeros(packs, dtype=np.int64), np.empty(packs, dtype=np.int64), 0  # from 1 on
    for i in range(len(pack_of)):
        if number[pack_of[i]] == 0:
            group_of_pack[used] = group_of[i]
            used += 1
            number[pack_of[i]] = used
        pack_of[i] = number[pack_of[i]] - 1
    return Packs(pack_of, used, group_of_pack[:used])


@kernel
def _exchange(load: FloatArray, group_of: IntArray, sequences: Sequences) -> None:
    """Move sequences away from the busiest group, or swap them for lighter ones, while that lowers its load."""
    # Every exchange lowers the busiest load, so the limit only saves time.
    mean, left = total_of(load) / len(load), _EXCHANGES
    while left > 0:
        busiest, idlest = 0, 0
        for group in range(1, len(load)):
            if load[group] > load[busiest]:
                busiest = group
            if load[group] < load[idlest]:
                idlest = group
        best, giver, taker, other = load[busiest], NONE, NONE, NONE
        if best <= mean * (1.0 + _LEVEL_ENOUGH):
            return
        for i in range(len(group_of)):
            if group_of[i] != busiest:
                continue
            # Counted, not timed, so that the answer does not depend on the machine's speed.
            left -= len(group_of)
            work = sequences.work[i]
            # The best move goes to the idlest group; the best swap may be with any.
            if max(load[busiest] - work, load[idlest] + work) < best:
                best, giver, taker, other = max(load[busiest] - work, load[idlest] + work), i, NONE, idlest
            for j in range(len(group_of)):
                if group_of[j] == busiest or sequences.work[j] >= work:
                    continue
                moved = work - sequences.work[j]
                after = max(load[busiest] - moved, load[group_of[j]] + moved)
                if after < best:
                    best, giver, taker, other = after, i, j, group_of[j]
        if giver == NONE:
            return
        moved = sequences.work[giver]
        if taker != NONE:
            moved -= sequences.work[taker]
            group_of[taker] = busiest
        group_of[giver] = other
        load[busiest] -= moved
        load[other] += moved


@kernel
def _pack_level(
    group_tokens: int, by_work: IntArray, group_of: IntArray, counts: IntArray, pack_of: IntArray, sequences: Sequences
) -> int:
    """Put each sequence into its group's pack with the least work among those with room.

    Return NONE, or a group whose packs had no room.
    """
    first = np.zeros(len(counts) + 1, dtype=np.int64)
    for group in range(len(counts)):
        first[group + 1] = first[group] + counts[group]
    # Packs of all groups, back to back.
    work, tokens = np.zeros(first[-1]), np.zeros(first[-1], dtype=np.int64)
    for i in by_work:
        best = NONE
        for pack in range(first[group_of[i]], first[group_of[i] + 1]):
            has_room = tokens[pack] + sequences.tokens[i] <= group_tokens
            if has_room and (best == NONE or work[pack] < work[best]):
                best = pack
        if best == NONE:
            return int(group_of[i])
        pack_of[i] = best
        work[best] += sequences.work[i]
        tokens[best] += sequences.tokens[i]
    return NONE


@kernel
def share_out(degree: int, waves: bool, packs: Packs, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Deal the packs to the groups, longest first: under waves in turn, else each to the group that is free first.

    Group g has the ranks from g * degree on. Sequences must be padded for the degree. Packs that have a group keep it.

    Returns:
        Predicted seconds of the step; [packs] the packs in the order of dealing; [packs] the group and turn of each.
    """
    count = packs.number
    loads = make_loads(count)
    for i in range(len(packs.of)):
        p = packs.of[i]
        enter_load(p, together(load_at(p, loads), sequence_load(i, sequences, inputs)), loads)
    # If the degree does not divide a node, only some groups cross nodes: rank packs as if all did.
    span = common_divisor(inputs.ranks_per_node, degree) if inputs.ranks_per_node % degree else 0
    seconds = np.empty(count)
    for p in range(count):
        seconds[p] = pack_seconds(load_at(p, loads), degree, span, inputs)
    by = falling_order(seconds)
    group_of, turn_of = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    # Left-over ranks idle.
    groups = inputs.num_ranks // degree
    across = np.empty(groups, dtype=np.int64)
    for group in range(groups):
        across[group] = across_of(group * degree, degree, inputs)
    # Deal by expected seconds, charge the real ones: the price depends on the nodes that the group crosses.
    ends, turns, expected = np.zeros(groups), np.zeros(groups, dtype=np.int64), make_tree(groups)
    for group in range(groups):
        set_room(expected, group, 0.0, 0)
    # A turn is a wave, which lasts at least the floor.
    longest = np.empty(count)  # [turns]
    for turn in range(count):
        longest[turn] = inputs.floor
    for k in range(count):
        p = by[k]
        group = k % groups if waves else roomiest(expected)
        if len(packs.group_of):
            group = packs.group_of[p]
        group_of[k], turn_of[k] = group, turns[group]
        turns[group] += 1
        taken = pack_seconds(load_at(p, loads), degree, across[group], inputs)
        longest[turn_of[k]] = max(longest[turn_of[k]], taken)
        ends[group] += taken
        set_room(expected, group, expected.seconds[(len(expected.seconds) >> 1) + group] - seconds[p], 0)
    return (total_of(longest[: most_of(turns)]) if waves else most_of(ends)), by, group_of, turn_of


@kernel
def _padded_for_all(degree: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the sequences padded for groups of this degree."""
    n = len(sequences.work)
    padded = Sequences(np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.int64))
    for i in range(n):
        load = padded_load(i, degree, sequences, inputs)
        padded.attention[i], padded.linear[i], padded.tokens[i] = load.attention, load.linear, load.tokens
        padded.work[i] = load.attention + load.linear
    return padded
