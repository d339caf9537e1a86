"""Single-rank work ("sand") on what rings leave of the timelines: first-fit decreasing, then balancing.

A bin is an interval of one rank's time: from its last ring to the target, or a wait before a ring. Its sequences lie in
slots, one slot per micro-batch, each within the token budget; every open slot costs the bin a micro-batch's fixed
seconds. Small sequences may also ride in a ring: where its ranks have tokens to spare, that costs no
further micro-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.plan.step import FloatArray, Int64Array
from fcp_cli.planning.compiled.compiling import kernel
from fcp_cli.planning.compiled.core import (
    NO_BIN,
    Machine,
    Sequences,
    Tree,
    first_with_room,
    make_tree,
    pack_seconds,
    padded_for,
    roomiest,
    set_room,
)
from fcp_cli.planning.compiled.rings import Rings, Timeline

CLOSED = -1  # tokens left in a slot that is not in use
END = -1
_SAMPLE = 160  # bins that balancing compares the worst bin with, at most
_SAMPLES_IN_VAIN = 16  # samples without a better exchange after which balancing ends
_EPSILON = 1e-9


class Sand(NamedTuple):
    """Bins (ranks first, then gaps), the slots in them, and where each sequence lies.

    Attributes:
        free: [bins] seconds left.
        slot_tokens: [bins, slots] tokens left, or CLOSED.
        head, after, before: the sequences of each bin as linked lists.
        bin_of, slot_of: [sequences]; a sequence that rides in ring g has bin -2 - g.
        ring_attention, ring_linear, ring_tokens: [rings] what each ring carries, riders included.
    """

    free: FloatArray
    slot_tokens: Int64Array
    head: Int64Array
    after: Int64Array
    before: Int64Array
    bin_of: Int64Array
    slot_of: Int64Array
    ring_attention: FloatArray
    ring_linear: FloatArray
    ring_tokens: Int64Array


@kernel
def make_sand(sequences: int, bins: int, slots: int, rings: int) -> Any:
    return Sand(
        np.zeros(bins),
        np.full((bins, slots), CLOSED),
        np.full(bins, END),
        np.full(sequences, END),
        np.full(sequences, END),
        np.full(sequences, NO_BIN),
        np.zeros(sequences, dtype=np.int64),
        np.zeros(rings),
        np.zeros(rings),
        np.zeros(rings, dtype=np.int64),
    )


@kernel
def _put(i: int, b: int, slot: int, sequences: Sequences, machine: Machine, sand: Sand) -> None:
    """Lay sequence i into a slot, opening it if need be."""
    if sand.slot_tokens[b, slot] == CLOSED:
        sand.slot_tokens[b, slot] = machine.budget
        sand.free[b] -= machine.beta
    sand.slot_tokens[b, slot] -= sequences.tokens[i]
    sand.free[b] -= sequences.work[i]
    sand.bin_of[i] = b
    sand.slot_of[i] = slot
    sand.before[i] = END
    sand.after[i] = sand.head[b]
    if sand.head[b] != END:
        sand.before[sand.head[b]] = i
    sand.head[b] = i


@kernel
def _take(i: int, sequences: Sequences, machine: Machine, sand: Sand) -> None:
    """Take sequence i out of its slot, closing the slot if nothing is left in it."""
    b, slot = sand.bin_of[i], sand.slot_of[i]
    sand.slot_tokens[b, slot] += sequences.tokens[i]
    sand.free[b] += sequences.work[i]
    if sand.slot_tokens[b, slot] == machine.budget:
        sand.slot_tokens[b, slot] = CLOSED
        sand.free[b] += machine.beta
    if sand.before[i] != END:
        sand.after[sand.before[i]] = sand.after[i]
    else:
        sand.head[b] = sand.after[i]
    if sand.after[i] != END:
        sand.before[sand.after[i]] = sand.before[i]


@kernel
def _slot_with_room(b: int, tokens: int, sand: Sand) -> int:
    """The first open slot of a bin with so many tokens left, or NO_BIN."""
    for slot in range(sand.slot_tokens.shape[1]):
        if sand.slot_tokens[b, slot] >= tokens:
            return slot
    return NO_BIN


@kernel
def _closed_slot(b: int, sand: Sand) -> int:
    for slot in range(sand.slot_tokens.shape[1]):
        if sand.slot_tokens[b, slot] == CLOSED:
            return slot
    return NO_BIN


@kernel
def _reset(
    target: float,
    gaps: int,
    sequences: Sequences,
    machine: Machine,
    timeline: Timeline,
    rings: Rings,
    count: int,
    sand: Sand,
) -> None:
    sand.slot_tokens[:] = CLOSED
    sand.head[:] = END
    sand.bin_of[:] = NO_BIN
    for rank in range(machine.num_ranks):
        sand.free[rank] = target - timeline.free[rank]
    for gap in range(gaps):
        sand.free[machine.num_ranks + gap] = timeline.gap_end[gap] - timeline.gap_start[gap]
    for g in range(count):
        i = rings.sequence[g]
        sand.ring_attention[g], sand.ring_linear[g], sand.ring_tokens[g] = padded_for(
            sequences.attention[i], sequences.linear[i], sequences.tokens[i], rings.degree[g], machine
        )


@kernel
def _ring_room(g: int, timeline: Timeline, rings: Rings, sand: Sand) -> float:
    """Seconds by which ring g may grow; 0 where something follows it on one of its ranks."""
    room = np.inf
    for r in rings.ranks[rings.first[g] : rings.first[g + 1]]:
        if timeline.free[r] > rings.end[g]:
            return 0.0
        room = min(room, sand.free[r])
    return room


@kernel
def _ride(
    i: int, tree: Tree, sequences: Sequences, machine: Machine, timeline: Timeline, rings: Rings, sand: Sand
) -> int:
    """Let sequence i ride in the first ring that can take it; the ring, or NO_BIN."""
    g = first_with_room(tree, sequences.work[i], sequences.tokens[i], 0)
    while g != NO_BIN:
        degree, crosses = rings.degree[g], rings.crosses[g] > 0
        attention, linear, tokens = padded_for(
            sequences.attention[i], sequences.linear[i], sequences.tokens[i], degree, machine
        )
        before = pack_seconds(
            sand.ring_attention[g], sand.ring_linear[g], sand.ring_tokens[g], degree, crosses, machine
        )
        after = pack_seconds(
            sand.ring_attention[g] + attention,
            sand.ring_linear[g] + linear,
            sand.ring_tokens[g] + tokens,
            degree,
            crosses,
            machine,
        )
        room = _ring_room(g, timeline, rings, sand)
        # Riding must not cost more rank-seconds than the work itself and a share of a micro-batch.
        if after - before <= room and degree * (after - before) <= sequences.work[i] * 1.02:
            sand.ring_attention[g] += attention
            sand.ring_linear[g] += linear
            sand.ring_tokens[g] += tokens
            for r in rings.ranks[rings.first[g] : rings.first[g + 1]]:
                sand.free[r] -= after - before
            sand.bin_of[i] = -2 - g
            set_room(tree, g, degree * (room - after + before), degree * machine.budget - sand.ring_tokens[g])
            return g
        set_room(tree, g, degree * room, degree * machine.budget - sand.ring_tokens[g])
        g = first_with_room(tree, sequences.work[i], sequences.tokens[i], g + 1)
    return NO_BIN


@kernel
def fill(
    target: float,
    first: Int64Array,
    gaps: int,
    count: int,
    ride: bool,
    sequences: Sequences,
    machine: Machine,
    timeline: Timeline,
    rings: Rings,
    sand: Sand,
) -> int:
    """Lay the sequences `first` (by falling work) into the bins; how many did not fit (they go where most is left).

    -1: not even with more seconds than the bins have, for lack of slots.
    """
    _reset(target, gaps, sequences, machine, timeline, rings, count, sand)
    bins = machine.num_ranks + gaps
    tree, closed = make_tree(bins), make_tree(bins)
    for b in range(bins):
        set_room(closed, b, sand.free[b] - machine.beta, 0)
    rides = make_tree(max(count, 1))
    if ride:
        for g in range(count):
            room = _ring_room(g, timeline, rings, sand)
            set_room(rides, g, rings.degree[g] * room, rings.degree[g] * machine.budget - sand.ring_tokens[g])
    left_over = 0
    for i in first:
        work, tokens = sequences.work[i], sequences.tokens[i]
        b = first_with_room(tree, work, tokens, 0)
        if b == NO_BIN and ride:
            g = _ride(i, rides, sequences, machine, timeline, rings, sand)
            if g != NO_BIN:
                for r in rings.ranks[rings.first[g] : rings.first[g + 1]]:
                    _tell(r, tree, closed, machine, sand)
                continue
        if b == NO_BIN:
            b = roomiest(closed)
            if closed.seconds[1] < work:
                left_over += 1
            slot = _slot_with_room(b, tokens, sand)
            if slot == NO_BIN:
                slot = _closed_slot(b, sand)
            if slot == NO_BIN:
                return -1  # cannot be, see `iteration._slots`; but no slot is written unseen
        else:
            slot = _slot_with_room(b, tokens, sand)
        _put(i, b, slot, sequences, machine, sand)
        _tell(b, tree, closed, machine, sand)
    return left_over


@kernel
def _tell(b: int, tree: Tree, closed: Tree, machine: Machine, sand: Sand) -> None:
    """Bring both trees up to date with bin b."""
    most = 0
    can_open = False
    for slot in range(sand.slot_tokens.shape[1]):
        if sand.slot_tokens[b, slot] == CLOSED:
            can_open = True
            break
        most = max(most, sand.slot_tokens[b, slot])
    set_room(tree, b, sand.free[b], most)
    set_room(closed, b, sand.free[b] - machine.beta if can_open else -1e300, 0)


@kernel
def balance(target: float, gaps: int, work_limit: int, sequences: Sequences, machine: Machine, sand: Sand) -> float:
    """Move and swap sequences so that the rank that ends last ends sooner; its end, within a counted amount of work."""
    num_ranks = machine.num_ranks
    bins = num_ranks + gaps
    evaluations = 0
    # Neighbouring bins hold much the same: a sample is spread over all of them.
    sample, in_vain, stride = 0, 0, max(1, bins // _SAMPLE)
    while True:
        worst = 0
        for rank in range(1, num_ranks):
            if sand.free[rank] < sand.free[worst]:
                worst = rank
        if evaluations >= work_limit:
            break
        best, best_i, best_j, best_bin = sand.free[worst] + _EPSILON, END, END, NO_BIN
        i = sand.head[worst]
        while i != END:
            work, tokens = sequences.work[i], sequences.tokens[i]
            at = sand.slot_tokens[worst, sand.slot_of[i]]
            alone = machine.beta if at + tokens == machine.budget else 0.0
            for k in range(min(bins, _SAMPLE)):
                c = (sample + k * stride) % bins
                if c == worst or sand.free[c] <= best:
                    continue
                evaluations += 1
                score = min(sand.free[worst] + work + alone, sand.free[c] - work)
                if score > best:
                    if _slot_with_room(c, tokens, sand) == NO_BIN:
                        score = min(score, sand.free[c] - work - machine.beta)
                        if score > best and _closed_slot(c, sand) == NO_BIN:
                            score = best
                    if score > best:
                        best, best_i, best_j, best_bin = score, i, END, c
                j = sand.head[c]
                while j != END:
                    evaluations += 1
                    less = work - sequences.work[j]
                    score = min(sand.free[worst] + less, sand.free[c] - less)
                    if score > best:
                        fewer = tokens - sequences.tokens[j]
                        if at + fewer >= 0 and sand.slot_tokens[c, sand.slot_of[j]] >= fewer:
                            best, best_i, best_j, best_bin = score, i, j, c
                    j = sand.after[j]
            i = sand.after[i]
        if best_i == END:
            in_vain += 1
            if in_vain * _SAMPLE >= min(bins, _SAMPLES_IN_VAIN * _SAMPLE):
                break
            sample += 1
            continue
        in_vain = 0
        _exchange(best_i, best_j, best_bin, sequences, machine, sand)
        sample += 1
    return float(target - sand.free[worst])


@kernel
def _exchange(i: int, j: int, c: int, sequences: Sequences, machine: Machine, sand: Sand) -> None:
    """Move i to bin c, or swap it with j there."""
    b, slot = sand.bin_of[i], sand.slot_of[i]
    if j == END:
        _take(i, sequences, machine, sand)
        to = _slot_with_room(c, sequences.tokens[i], sand)
        if to == NO_BIN:
            to = _closed_slot(c, sand)
        _put(i, c, to, sequences, machine, sand)
        return
    other = sand.slot_of[j]
    _take(i, sequences, machine, sand)
    _take(j, sequences, machine, sand)
    _put(j, b, slot, sequences, machine, sand)
    _put(i, c, other, sequences, machine, sand)
