"""Single-rank packs in the time that rings leave on ranks: first-fit decreasing; `balancing` follows.

A bin is an interval of one rank's time: from its last ring to the target, or a wait before a ring. Its sequences lie in
slots, one slot per micro-batch, each within the token budget; every open slot costs the bin a micro-batch's fixed
seconds. Several sequences share a slot only up to `shared_tokens`; a single one may have up to the budget. Small
sequences may also join a ring: if its ranks have free tokens, that costs no further micro-batch.

    fill:     for each sequence, by falling work:
                  lay it into the first open slot whose bin has the seconds and which has the tokens;
                  else let it ride in the first ring that can take it;                       _ride
                  else open a slot in the bin with the most seconds left, ending late if need be

No array overflows: there is a bin for every rank and for every gap that `rings.Timeline` has space for, a slot is only
    written after it was found, and `iteration._slots` makes enough of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.arrays import FloatArray, IntArray
from fcp_cli.compiling.compile import kernel, leaf
from fcp_cli.planning.compiled.core import (
    NONE,
    Loads,
    PlannerInputs,
    Sequences,
    enter_load,
    load_at,
    make_loads,
    pack_seconds,
    padded_load,
    together,
)
from fcp_cli.planning.compiled.room_tree import (
    Tree,
    first_with_room,
    make_tree,
    most_work,
    roomiest,
    set_room,
    usable_seconds,
)
from fcp_cli.planning.compiled.timelines.rings import Rings, Timeline
from fcp_cli.planning.compiled.ways import traffic_of

CLOSED = -1  # tokens left in a slot that is not in use
END = -1
_MARGIN = 1e-9  # relative; keeps rounding on the safe side
# Without riders, drafts of 24 steps on 64 ranks under `iteration` take 0.1 % longer in the mean, 0.5 % at most.
_RIDE = 1.02  # of its work, by which a sequence may lengthen the ring that it rides in, all ranks together


class SingleRankPacks(NamedTuple):
    """Bins (ranks first, then gaps), the slots in them, and the place of each sequence.

    Attributes:
        free: [bins] seconds left.
        slot_tokens: [bins, slots] tokens left, or CLOSED.
        head, after, before: the sequences of each bin as linked lists.
        bin_of, slot_of: [sequences]; a sequence that rides in ring g has bin -2 - g.
        rings: the load of each ring, riders included.
        most: see `room_tree.most_work`.
        richest: [sequences] most that a sequence, or one of less work, may lengthen its ring's ranks by for each token.
        soonest: [2 x a power of two] tree of the seconds that each rank has left, for the rank that ends last.
    """

    free: FloatArray
    slot_tokens: IntArray
    head: IntArray
    after: IntArray
    before: IntArray
    bin_of: IntArray
    slot_of: IntArray
    rings: Loads
    most: FloatArray
    richest: FloatArray
    soonest: FloatArray


class Trees(NamedTuple):
    """Free seconds and tokens: of open slots in bins, of bins for new slots, and of rings."""

    open: Tree
    closed: Tree
    rides: Tree


@kernel
def make_single_rank_packs(bins: int, slots: int, sequences: Sequences, inputs: PlannerInputs) -> Any:
    """Make empty bins with `slots` slots each, and rings for all sequences."""
    n, leaves = len(sequences.work), 1
    richest = np.zeros(n + 1)
    # From the lightest on: bins are filled by falling work, so entry i covers all that is still to come.
    for i in range(n - 1, -1, -1):
        spared = _RIDE * sequences.work[i] - sequences.linear[i]
        richest[i] = max(richest[i + 1], spared / sequences.tokens[i])
    while leaves < inputs.num_ranks:
        leaves *= 2
    return SingleRankPacks(
        np.zeros(bins),
        np.full((bins, slots), CLOSED),
        np.full(bins, END),
        np.full(n, END),
        np.full(n, END),
        np.full(n, NONE),
        np.zeros(n, dtype=np.int64),
        make_loads(n),
        most_work(sequences, inputs),
        richest,
        np.full(2 * leaves, np.inf),
    )


@leaf
def put(i: int, b: int, slot: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Lay sequence i into a slot, opening it if need be."""
    if singles.slot_tokens[b, slot] == CLOSED:
        singles.slot_tokens[b, slot] = inputs.tokens_per_rank
        singles.free[b] -= inputs.prices.beta
    singles.slot_tokens[b, slot] -= sequences.tokens[i]
    singles.free[b] -= sequences.work[i]
    singles.bin_of[i] = b
    singles.slot_of[i] = slot
    singles.before[i] = END
    singles.after[i] = singles.head[b]
    if singles.head[b] != END:
        singles.before[singles.head[b]] = i
    singles.head[b] = i


@leaf
def take(i: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Take sequence i out of its slot, closing the slot if nothing is left in it."""
    b, slot = singles.bin_of[i], singles.slot_of[i]
    singles.slot_tokens[b, slot] += sequences.tokens[i]
    singles.free[b] += sequences.work[i]
    # All tokens are back: it was alone.
    if singles.slot_tokens[b, slot] == inputs.tokens_per_rank:
        singles.slot_tokens[b, slot] = CLOSED
        singles.free[b] += inputs.prices.beta
    if singles.before[i] != END:
        singles.after[singles.before[i]] = singles.after[i]
    else:
        singles.head[b] = singles.after[i]
    if singles.after[i] != END:
        singles.before[singles.after[i]] = singles.before[i]


@leaf
def slot_with_room(b: int, tokens: int, inputs: PlannerInputs, singles: SingleRankPacks) -> int:
    """Return the first open slot of a bin with so many tokens left to share, or NONE."""
    # Slots count down from the whole budget, of which sequences that share one must leave this much.
    held_back = max(0, inputs.tokens_per_rank - inputs.shared_tokens)
    for slot in range(singles.slot_tokens.shape[1]):
        if singles.slot_tokens[b, slot] >= tokens + held_back:
            return slot
    return NONE


@leaf
def closed_slot(b: int, singles: SingleRankPacks) -> int:
    """Return the first slot of a bin that is not in use, or NONE."""
    for slot in range(singles.slot_tokens.shape[1]):
        if singles.slot_tokens[b, slot] == CLOSED:
            return slot
    return NONE


@leaf
def _reset(
    target: float,
    sequences: Sequences,
    inputs: PlannerInputs,
    timeline: Timeline,
    rings: Rings,
    singles: SingleRankPacks,
) -> None:
    """Empty the bins, and give them and the rings the time that the timelines leave until `target`."""
    singles.slot_tokens[:] = CLOSED
    singles.head[:] = END
    singles.bin_of[:] = NONE
    for rank in range(inputs.num_ranks):
        singles.free[rank] = target - timeline.free[rank]
    # Gaps are bins behind those of the ranks: both are filled by one rule.
    for gap in range(timeline.gaps[0]):
        singles.free[inputs.num_ranks + gap] = timeline.gap_end[gap] - timeline.gap_start[gap]
    for g in range(rings.placed[0]):
        enter_load(g, padded_load(rings.sequence[g], rings.degree[g], sequences, inputs), singles.rings)


@leaf
def _ring_room(g: int, timeline: Timeline, rings: Rings, singles: SingleRankPacks) -> float:
    """Return the seconds by which ring g may grow; 0 if something follows it on one of its ranks."""
    room = np.inf
    for r in range(rings.first[g], rings.first[g] + rings.degree[g]):
        # Packs after a ring would start later, and with them every rank of that ring.
        if timeline.free[r] > rings.end[g]:
            return 0.0
        room = min(room, singles.free[r])
    return room


@leaf
def _ride(
    i: int,
    tree: Tree,
    sequences: Sequences,
    inputs: PlannerInputs,
    timeline: Timeline,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Let sequence i ride in the first ring that can take it; return the ring, or NONE."""
    # Rank-seconds and tokens of all the ring's ranks together, over which a rider is spread.
    g = first_with_room(tree, sequences.work[i], sequences.tokens[i], 0)
    while g != NONE:
        degree, across = rings.degree[g], rings.across[g]
        held = load_at(g, singles.rings)
        more = together(held, padded_load(i, degree, sequences, inputs))
        before = pack_seconds(held, degree, across, inputs)
        after = pack_seconds(more, degree, across, inputs)
        room = _ring_room(g, timeline, rings, singles)
        # Riding saves a micro-batch's beta, but may lengthen the ring for all its ranks: by 2 % of the work at most.
        if after - before <= room and degree * (after - before) <= sequences.work[i] * _RIDE:
            enter_load(g, more, singles.rings)
            for r in range(rings.first[g], rings.first[g] + rings.degree[g]):
                singles.free[r] -= after - before
            singles.bin_of[i] = -2 - g  # -1 is NONE
            set_room(
                tree, g, degree * (room - after + before), degree * inputs.tokens_per_rank - singles.rings.tokens[g]
            )
            return g
        # Its ranks' bins were filled since its room was entered. Of the sequences to come, those with more tokens than
        # the ring's attention still hides lengthen it too much: unseen, it would be tried for all of them.
        tokens = degree * inputs.tokens_per_rank - held.tokens
        traffic, growth = traffic_of(held.tokens, degree, across, inputs)
        hidden = degree * (before * (1.0 + _MARGIN) - inputs.prices.beta - traffic) - held.linear
        per_token = degree * growth - singles.richest[i]
        if hidden < per_token * tokens:
            tokens = int(np.ceil(max(0.0, hidden / per_token)))
        set_room(tree, g, degree * room, tokens)
        g = first_with_room(tree, sequences.work[i], sequences.tokens[i], g + 1)
    return NONE


@kernel
def fill(
    target: float,
    order: IntArray,
    sequences: Sequences,
    inputs: PlannerInputs,
    timeline: Timeline,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Lay sequences into the bins, as the module says.

    Args:
        target: seconds by which the ranks should end.
        order: the sequences, by falling work.
        sequences, inputs, timeline, rings, singles: the state of the step; rings are placed.

    Returns:
        How many sequences end too late, or -1 if a slot is lacking.
    """
    _reset(target, sequences, inputs, timeline, rings, singles)
    bins, count = inputs.num_ranks + timeline.gaps[0], rings.placed[0]
    tree, closed = make_tree(bins), make_tree(bins)
    # A new slot costs a micro-batch's fixed seconds, which the tree takes off beforehand.
    for b in range(bins):
        set_room(closed, b, singles.free[b] - inputs.prices.beta, 0)
    rides = make_tree(count)
    for g in range(count):
        room = _ring_room(g, timeline, rings, singles)
        set_room(rides, g, rings.degree[g] * room, rings.degree[g] * inputs.tokens_per_rank - singles.rings.tokens[g])
    return int(_lay(order, Trees(tree, closed, rides), sequences, inputs, timeline, rings, singles))


@leaf
def _lay(
    order: IntArray,
    trees: Trees,
    sequences: Sequences,
    inputs: PlannerInputs,
    timeline: Timeline,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Lay sequences into bins that are empty; see `fill`."""
    tree, closed, rides = trees.open, trees.closed, trees.rides
    late = 0
    for i in order:
        work, tokens = sequences.work[i], sequences.tokens[i]
        # Open slots first: they cost no beta. Then rings, which cost none either, then a new slot.
        b = first_with_room(tree, work, tokens, 0)
        if b == NONE:
            g = _ride(i, rides, sequences, inputs, timeline, rings, singles)
            if g != NONE:
                # The ring ends later now, so what follows it on its ranks has less time.
                for r in range(rings.first[g], rings.first[g] + rings.degree[g]):
                    _update_trees(r, tree, closed, inputs, singles)
                continue
        if b == NONE:
            # Also if late: balancing may still move it, while a lost sequence could not be planned.
            b = roomiest(closed)
            # Node 1 is the root: the most seconds of any bin.
            late += closed.seconds[1] < work
        slot = slot_with_room(b, tokens, inputs, singles)
        if slot == NONE:
            slot = closed_slot(b, singles)
        if slot == NONE:
            return -1
        put(i, b, slot, sequences, inputs, singles)
        _update_trees(b, tree, closed, inputs, singles)
    return late


@leaf
def _update_trees(b: int, tree: Tree, closed: Tree, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Bring the trees of open and of closed slots up to date with bin b."""
    most = 0
    can_open = False
    for slot in range(singles.slot_tokens.shape[1]):
        if singles.slot_tokens[b, slot] == CLOSED:
            # While bins are filled slots open from the left and none closes: all behind a closed one are closed.
            can_open = True
            break
        most = max(most, singles.slot_tokens[b, slot])
    shared = most - max(0, inputs.tokens_per_rank - inputs.shared_tokens)
    set_room(tree, b, usable_seconds(singles.free[b], shared, singles.most, inputs), shared)
    # Finite: more than the leaves beyond the bins have, so that `roomiest` always answers a bin.
    set_room(closed, b, singles.free[b] - inputs.prices.beta if can_open else -1e300, 0)
