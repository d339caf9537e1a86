"""One degree for a whole step: how `static` packs and shares out, and which of its answers is quickest.

No array overflows: there are at most as many packs as sequences, and every group is one of num_ranks // degree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import inlined, kernel
from fcp_cli.planning.compiled.alone import alone_at_best, at_best
from fcp_cli.planning.compiled.core import (
    NONE,
    PlannerInputs,
    Sequences,
    across_of,
    common_divisor,
    enter_load,
    falling_order,
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
from fcp_cli.planning.compiled.ways import least_of_packs

FULL, EVEN, LEVEL = 0, 1, 2  # how sequences become packs
_EXCHANGES = 300_000  # pairs of sequences compared for one degree
_LEVEL_ENOUGH = 1e-4  # relative; groups as busy as that are not evened out further
_HIDING = 4  # positive shares of attention that are tried as hiding messages
_MARGIN = 1e-9  # relative; by so much a bound may be rounded up


class Packs(NamedTuple):
    """Sequences in packs.

    Attributes:
        of: [sequences] the pack of each sequence.
        number: how many packs there are.
        group_of: [packs] the group of each pack; empty until packs have groups.
    """

    of: IntArray
    number: int
    group_of: IntArray


@kernel
def longest_first(sequences: Sequences) -> IntArray:
    """Return [sequences] positions by falling tokens, ties by position."""
    return falling_order(sequences.tokens)


@kernel
def full_packs(group_tokens: int, by_tokens: IntArray, sequences: Sequences) -> Any:
    """Pack first-fit decreasing; return [sequences] pack of each sequence, and the number of packs."""
    pack_of = np.empty(len(by_tokens), dtype=np.int64)
    # At most a pack for each sequence. Those not opened yet have -inf seconds, which no search asks for.
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
    """Return `packs`, or as many more as give every group the same number of them."""
    # Rounded up, in integers.
    return -(-packs // groups) * groups


@kernel
def even_packs(packs: int, group_tokens: int, by_tokens: IntArray, sequences: Sequences) -> Any:
    """Pack longest first, each into the pack with fewest tokens; return as `full_packs`, 0 packs if one overflows."""
    pack_of = np.empty(len(by_tokens), dtype=np.int64)
    tree = make_tree(packs)
    leaf = len(tree.seconds) >> 1
    # Tokens held, negated, in the place of seconds: `roomiest` finds the emptiest.
    for pack in range(packs):
        set_room(tree, pack, 0.0, 0)
    for i in by_tokens:
        pack = roomiest(tree)
        left = tree.seconds[leaf + pack] - sequences.tokens[i]
        # The emptiest pack has no room, so nor has any other.
        if -left > group_tokens:
            return pack_of, 0
        pack_of[i] = pack
        set_room(tree, pack, left, 0)
    # `roomiest` breaks ties to the left, so that the first sequences open the first packs: empty ones are the last.
    return pack_of, min(packs, len(by_tokens))


@kernel
def _padded_for_all(degree: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the sequences with the padding that groups of this degree need."""
    n = len(sequences.work)
    padded = Sequences(np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.int64))
    for i in range(n):
        load = padded_load(i, degree, sequences, inputs)
        padded.attention[i], padded.linear[i], padded.tokens[i] = load.attention, load.linear, load.tokens
        padded.work[i] = load.attention + load.linear
    return padded


@kernel
def share_out(degree: int, waves: bool, packs: Packs, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Give the packs to the groups, longest first: under waves in turns, else each to the group that is free first.

    Group g has the ranks from g * degree on; the sequences are padded for that degree. Packs that have a group keep it.

    Returns:
        Predicted seconds of the step, [packs] packs in that order, and [packs] group and turn of each of them.
    """
    count = packs.number
    loads = make_loads(count)
    for i in range(len(packs.of)):
        p = packs.of[i]
        enter_load(p, together(load_at(p, loads), sequence_load(i, sequences, inputs)), loads)
    # Groups of a degree that does not divide a node lie partly across two: packs are ranked as if all did.
    span = common_divisor(inputs.ranks_per_node, degree) if inputs.ranks_per_node % degree else 0
    seconds = np.empty(count)
    for p in range(count):
        seconds[p] = pack_seconds(load_at(p, loads), degree, span, inputs)
    by = falling_order(seconds)
    group_of, turn_of = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    # Ranks that are left over run nothing of this step.
    groups = inputs.num_ranks // degree
    across = np.empty(groups, dtype=np.int64)
    for group in range(groups):
        across[group] = across_of(group * degree, degree, inputs)
    # Order by expected seconds, charge the real ones: a group's span is known only once it has the pack.
    ends, turns, expected = np.zeros(groups), np.zeros(groups, dtype=np.int64), make_tree(groups)
    for group in range(groups):
        set_room(expected, group, 0.0, 0)
    # A turn is a wave, which lasts no less than the floor.
    longest = np.empty(count)  # by turn
    for turn in range(count):
        longest[turn] = inputs.floor
    for k in range(count):
        p = by[k]
        # In turns, since a wave waits for all groups; else the group that is free first, which levels their ends.
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
def level_packs(degree: int, waves: bool, group_tokens: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Spread the sequences over the groups by work, then each group's over as few packs as its tokens need.

    As verl balances (`published.karmarkar_karp`), but greedily: most work first, to the bin with the least. Under waves
    all groups have equally many packs, each of similar work.

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
    # Greedy leaves groups apart by up to a sequence; exchanges level them.
    _exchange(load, group_of, sequences)
    held = np.zeros(groups, dtype=np.int64)
    for i in by_work:
        held[group_of[i]] += sequences.tokens[i]
    counts = np.empty(groups, dtype=np.int64)
    for group in range(groups):
        counts[group] = -(-held[group] // group_tokens)
    pack_of = np.empty(len(by_work), dtype=np.int64)
    # Packing by work may fail at the least number of packs: one more for that group, and again.
    # Ends: with a pack for each of its sequences, every group has room.
    while True:
        if waves:
            most = most_of(counts)
            for group in range(groups):
                counts[group] = most
        failed = _pack_level(group_tokens, by_work, group_of, counts, pack_of, sequences)
        if failed == NONE:
            break
        counts[failed] += 1
    # Groups may have packs that nothing went to.
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
    """Give sequences of the busiest group away, or exchange them for lighter ones, while that makes it less busy."""
    # Each exchange lowers the load of the busiest group, so this ends without the limit, too, only later.
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
            # Counted, not timed: the answer may not depend on the speed of a processor.
            left -= len(group_of)
            work = sequences.work[i]
            # A move ends lowest in the idlest group; a swap may in any.
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
    """Give each sequence the pack of its group with the least work among those with room; return a group without."""
    first = np.zeros(len(counts) + 1, dtype=np.int64)
    for group in range(len(counts)):
        first[group + 1] = first[group] + counts[group]
    # Packs of all groups back to back, those of group g from first[g] on.
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


@inlined
def _at_least(degree: int, attention: float, linear: float, tokens: int, inputs: PlannerInputs) -> float:
    """Return the least seconds of so much work on groups of one degree: all busy, packs as few as tokens allow."""
    packs = max(1.0, tokens / (degree * inputs.tokens_per_rank))
    # Every share of attention gives a bound, so the largest counts.
    overlapped = 0.0 if degree > 1 else attention
    for step in range(_HIDING + 1 if degree > 1 else 0):
        hiding = step / _HIDING
        least = least_of_packs(hiding, tokens, packs, degree, at_best(degree, inputs), inputs)
        overlapped = max(overlapped, hiding * attention / degree + least)
    # One group would take all packs one after another; num_ranks / degree groups share them, in fractions.
    return (inputs.prices.beta * packs + linear / degree + overlapped) * degree / inputs.num_ranks


@kernel
def quickest(seconds: float, degrees: IntArray, waves: bool, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Return the degree that takes fewer than these seconds and fewest of all: seconds, degree, how it is packed.

    Degree 0: none does. A degree is skipped untried if its work, or its longest sequence, takes as long.
    """
    best_degree, best_packing = 0, FULL
    by_tokens = longest_first(sequences)
    attention, linear, tokens = total_of(sequences.attention), total_of(sequences.linear), total_of(sequences.tokens)
    for degree in degrees:
        group_tokens = degree * inputs.tokens_per_rank
        if sequences.tokens[by_tokens[0]] > group_tokens:
            continue
        # A bound costs a few sums; packing and sharing out a degree costs a pass over all sequences.
        least = _at_least(degree, attention, linear, tokens, inputs)
        least = max(least, alone_at_best(by_tokens[0], degree, sequences, inputs))
        if least * (1.0 - _MARGIN) >= seconds:
            continue
        padded, longest = sequences, by_tokens
        # Padded once a degree, for all three packings.
        if inputs.padding:
            padded = _padded_for_all(degree, sequences, inputs)
            longest = longest_first(padded)
        for packing in (FULL, EVEN, LEVEL):
            packs = packed(packing, degree, waves, longest, padded, inputs)
            if packs.number == 0:
                continue
            found, _by, _group_of, _turn_of = share_out(degree, waves, packs, padded, inputs)
            # Ties keep the first: the lower degree, and the earlier packing.
            if found < seconds:
                seconds, best_degree, best_packing = found, degree, packing
    return seconds, best_degree, best_packing


@kernel
def laid_out(packing: int, degree: int, waves: bool, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Pack sequences, padded for this degree, and share them out; first-fit decreasing if even packs overflow.

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
    """Pack sequences, padded for this degree, in one of three ways: FULL, EVEN or LEVEL; 0 packs if one overflows."""
    group_tokens = degree * inputs.tokens_per_rank
    if packing == LEVEL:
        return level_packs(degree, waves, group_tokens, sequences, inputs)
    pack_of, count = full_packs(group_tokens, by_tokens, sequences)
    if packing == EVEN:
        count = even_count(count, inputs.num_ranks // degree)
        pack_of, count = even_packs(count, group_tokens, by_tokens, sequences)
    return Packs(pack_of, count, np.empty(0, dtype=np.int64))
