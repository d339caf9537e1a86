"""Single-rank packs in the time that rings leave: first-fit decreasing, before `timelines.balance`.

A bin is an interval of a rank's time: from its last ring to the target, or a gap before a ring. Its sequences lie in
slots, one per micro-batch, within the token budget. Every open slot costs the bin the fixed seconds of a micro-batch,
and the time that its device waits for the host, which the slot's work shortens.
Several sequences share a slot only up to `shared_tokens`; a single one may fill the budget. A small sequence may also
join the pack of a ring with free tokens (a rider), which saves a micro-batch.

    fill:     for each sequence, by falling work:
                  put it into an open slot with enough tokens, in the first bin with enough seconds;
                  else let it ride in the first ring that can take it;                       _ride
                  else open a slot in the bin with the most free seconds, even if it then ends late

No array overflows: every rank and every gap that `Rings` has space for has a bin, a slot is only written after it was
found, and there are enough of them (`_slots`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.planning.compiled.core import (
    NONE,
    PlannerInputs,
    Sequences,
    enter_load,
    load_at,
    pack_seconds,
    padded_load,
    together,
    total_of,
    traffic_of,
)
from fcp_cli.planning.compiled.ring_placement import Rings
from fcp_cli.planning.compiled.room_tree import (
    Tree,
    first_with_room,
    make_tree,
    most_work,
    roomiest,
    set_room,
    usable_seconds,
)
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import inlined, kernel, leaf

CLOSED = -1  # `slot_tokens` of an unused slot
END = -1  # of a linked list
_MARGIN = 1e-9  # relative; keeps rounding on the safe side
# Without riders, drafts of 24 steps on 64 ranks under `iteration` take 0.1 % longer on average, at most 0.5 %.
_RIDE = 1.02  # x its work: most rank-seconds that a rider may add to its ring
_MOST_SLOTS = 1 << 26  # of all bins together, 512 MB; exceeded only if the packs themselves need more


class SingleRankPacks(NamedTuple):
    """Bins (ranks first, then gaps), their slots, and the place of each sequence.

    Attributes:
        free: [bins] free seconds.
        slot_tokens: [bins, slots] free tokens, or CLOSED.
        slot_work: [bins, slots] seconds of work, or [bins, 0] if no host is priced.
        head, after, before: sequences of each bin as doubly linked lists.
        bin_of, slot_of: [sequences] bin and slot; a rider in ring g has bin -2 - g.
        order: [sequences] the single-rank sequences of an attempt, by falling work; entries beyond are unused.
        most: see `room_tree.most_work`.
        richest: [sequences + 1] most rank-seconds per token that this or any lighter sequence may add to its ring.
        soonest: [2 x a power of two] tree of minima over the free seconds of ranks, to find the rank that ends last.
    """

    free: FloatArray
    slot_tokens: IntArray
    slot_work: FloatArray
    head: IntArray
    after: IntArray
    before: IntArray
    bin_of: IntArray
    slot_of: IntArray
    order: IntArray
    most: FloatArray
    richest: FloatArray
    soonest: FloatArray


class Trees(NamedTuple):
    """Trees of free seconds and tokens: of bins with open slots, of bins for a new slot, and of rings for riders."""

    open: Tree
    closed: Tree
    rides: Tree


@kernel
def make_single_rank_packs(sequences: Sequences, inputs: PlannerInputs, rings: Rings) -> Any:
    """Make empty bins: one per rank, and one per gap that `rings` has space for."""
    n, bins, leaves = len(sequences.work), inputs.num_ranks + len(rings.gap_rank), 1
    richest = np.zeros(n + 1)
    # A running maximum from the lightest on: bins are filled by falling work, so entry i covers all still to come.
    for i in range(n - 1, -1, -1):
        spared = _RIDE * sequences.work[i] - sequences.linear[i]
        richest[i] = max(richest[i + 1], spared / sequences.tokens[i])
    while leaves < inputs.num_ranks:
        leaves *= 2
    slots = _slots(bins, sequences, inputs)
    return SingleRankPacks(
        np.zeros(bins),
        np.full((bins, slots), CLOSED),
        np.zeros((bins, slots if inputs.prices.host > 0.0 else 0)),
        np.full(bins, END),
        np.full(n, END),
        np.full(n, END),
        np.full(n, NONE),
        np.zeros(n, dtype=np.int64),
        np.zeros(n, dtype=np.int64),
        most_work(sequences, inputs),
        richest,
        np.full(2 * leaves, np.inf),
    )


@leaf
def _slots(bins: int, sequences: Sequences, inputs: PlannerInputs) -> int:
    """Return the number of slots per bin, such that `fill` never lacks one in all bins at once.

    A slot is opened only if no open slot of its bin has room, so any two slots of a bin together hold more than the
    shared budget, and all bins together open fewer than 2 x tokens / budget + bins slots. Four times the mean per rank,
    plus 8, exceeds that. No bin needs more slots than there are single-rank sequences. If bins x slots would take too
    much memory, only the tokens of single-rank sequences count, which keeps it linear in sequences and ranks.
    """
    # Only sequences that fit into a single rank can have a slot.
    singles, single_tokens = 0, 0
    for i in range(len(sequences.tokens)):
        if sequences.tokens[i] <= inputs.tokens_per_rank:
            singles += 1
            single_tokens += sequences.tokens[i]
    # With the smaller of the budgets, that of sequences which share a slot.
    step_tokens = inputs.num_ranks * min(inputs.shared_tokens, inputs.tokens_per_rank)
    slots = int(4 * (total_of(sequences.tokens) / step_tokens)) + 8
    return int(min(slots, singles + 1, max(_MOST_SLOTS // bins, int(4 * (single_tokens / step_tokens)) + 8)))


@kernel
def fill(
    target: float,
    order: IntArray,
    sequences: Sequences,
    inputs: PlannerInputs,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Fill the bins; see the module.

    Args:
        target: seconds by which the ranks should end.
        order: the single-rank sequences, by falling work.
        sequences, inputs, rings, singles: state of the step, with placed rings.

    Returns:
        The number of sequences that end too late, or -1 if there are too few slots.
    """
    _reset(target, sequences, inputs, rings, singles)
    bins, count = inputs.num_ranks + rings.gaps[0], rings.placed[0]
    tree, closed = make_tree(bins), make_tree(bins)
    for b in range(bins):
        set_room(closed, b, _room_of_new(b, inputs, singles), 0)
    rides = make_tree(count)
    for g in range(count):
        room = _ring_room(g, rings, singles)
        set_room(rides, g, rings.degree[g] * room, rings.degree[g] * inputs.tokens_per_rank - rings.loads.tokens[g])
    return int(_lay(order, Trees(tree, closed, rides), sequences, inputs, rings, singles))


@leaf
def _reset(
    target: float,
    sequences: Sequences,
    inputs: PlannerInputs,
    rings: Rings,
    singles: SingleRankPacks,
) -> None:
    """Empty the bins, set their free seconds from the timelines and `target`, and reset the loads of the rings."""
    singles.slot_tokens[:] = CLOSED
    singles.slot_work[:] = 0.0
    singles.head[:] = END
    singles.bin_of[:] = NONE
    for rank in range(inputs.num_ranks):
        singles.free[rank] = target - rings.free[rank]
    # Gaps are bins after those of the ranks.
    for gap in range(rings.gaps[0]):
        singles.free[inputs.num_ranks + gap] = rings.gap_end[gap] - rings.gap_start[gap]
    for g in range(rings.placed[0]):
        enter_load(g, padded_load(rings.sequence[g], rings.degree[g], sequences, inputs), rings.loads)


@leaf
def _lay(
    order: IntArray,
    trees: Trees,
    sequences: Sequences,
    inputs: PlannerInputs,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Put sequences into empty bins; see `fill`."""
    tree, closed, rides = trees.open, trees.closed, trees.rides
    late = 0
    for i in order:
        work, tokens = sequences.work[i], sequences.tokens[i]
        # Open slots, then rings, which cost no beta either, then a new slot.
        b = first_with_room(tree, work, tokens, 0)
        if b == NONE:
            g = _ride(i, rides, sequences, inputs, rings, singles)
            if g != NONE:
                # The ring ends later now, so the bins after it have less time.
                for r in range(rings.first[g], rings.first[g] + rings.degree[g]):
                    _update_trees(r, tree, closed, inputs, singles)
                continue
        if b == NONE:
            # Even if late, since balancing may still move it.
            b = roomiest(closed)
            # Node 1 is the root, the maximum over all bins.
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
def _ride(
    i: int,
    tree: Tree,
    sequences: Sequences,
    inputs: PlannerInputs,
    rings: Rings,
    singles: SingleRankPacks,
) -> int:
    """Let sequence i ride in the first ring that can take it; return the ring, or NONE."""
    # The tree holds rank-seconds and tokens of all ranks of a ring together, since a rider is sharded over them.
    g = first_with_room(tree, sequences.work[i], sequences.tokens[i], 0)
    while g != NONE:
        degree, across = rings.degree[g], rings.across[g]
        held = load_at(g, rings.loads)
        more = together(held, padded_load(i, degree, sequences, inputs))
        before = pack_seconds(held, degree, across, inputs)
        after = pack_seconds(more, degree, across, inputs)
        room = _ring_room(g, rings, singles)
        # A rider saves beta but lengthens the ring for all its ranks: by its work plus 2 % at most.
        if after - before <= room and degree * (after - before) <= sequences.work[i] * _RIDE:
            enter_load(g, more, rings.loads)
            for r in range(rings.first[g], rings.first[g] + rings.degree[g]):
                singles.free[r] -= after - before
            singles.bin_of[i] = -2 - g  # -1 is NONE
            set_room(tree, g, degree * (room - after + before), degree * inputs.tokens_per_rank - rings.loads.tokens[g])
            return g
        # Update the ring's room: its ranks' bins have been filled since. Later sequences with more tokens than the
        # ring's attention can still hide would lengthen it too much. Without this limit on tokens, the tree would offer
        # the ring to all of them.
        tokens = degree * inputs.tokens_per_rank - held.tokens
        traffic, growth = traffic_of(held.tokens, degree, across, inputs)
        hidden = degree * (before * (1.0 + _MARGIN) - inputs.prices.beta - traffic) - held.linear
        per_token = degree * growth - singles.richest[i]
        if hidden < per_token * tokens:
            tokens = int(np.ceil(max(0.0, hidden / per_token)))
        set_room(tree, g, degree * room, tokens)
        g = first_with_room(tree, sequences.work[i], sequences.tokens[i], g + 1)
    return NONE


@leaf
def _ring_room(g: int, rings: Rings, singles: SingleRankPacks) -> float:
    """Return the seconds by which ring g may grow; 0 if another ring follows it on one of its ranks."""
    room = np.inf
    for r in range(rings.first[g], rings.first[g] + rings.degree[g]):
        # A later ring would start later, with all its ranks.
        if rings.free[r] > rings.end[g]:
            return 0.0
        room = min(room, singles.free[r])
    return room


@leaf
def _update_trees(b: int, tree: Tree, closed: Tree, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Update bin b in the trees of open and of closed slots."""
    most, waits = 0, 0.0
    can_open = False
    for slot in range(singles.slot_tokens.shape[1]):
        if singles.slot_tokens[b, slot] == CLOSED:
            # During `fill` slots open from the left and none closes, so all after a closed one are closed.
            can_open = True
            break
        most = max(most, singles.slot_tokens[b, slot])
        waits = max(waits, eased(b, slot, np.inf, inputs, singles))
    shared = most - max(0, inputs.tokens_per_rank - inputs.shared_tokens)
    set_room(tree, b, usable_seconds(singles.free[b] + waits, shared, singles.most, inputs), shared)
    # -1e300 instead of -inf, the value of unused leaves, so that `roomiest` always returns a bin.
    set_room(closed, b, _room_of_new(b, inputs, singles) if can_open else -1e300, 0)


@inlined
def _room_of_new(b: int, inputs: PlannerInputs, singles: SingleRankPacks) -> float:
    """Return the most work of a new slot of bin b that ends in time; negative if not even its host does."""
    beta, host = inputs.prices.beta, inputs.prices.host
    return float(singles.free[b] - (beta if singles.free[b] >= host else max(beta, host)))


@inlined
def waits_for_host(work: float, inputs: PlannerInputs) -> float:
    """Return the seconds that a slot with this work waits for its host."""
    return max(0.0, inputs.prices.host - inputs.prices.beta - work)


@inlined
def eased(b: int, slot: int, more: float, inputs: PlannerInputs, singles: SingleRankPacks) -> float:
    """Return by how much an open slot waits less for its host if its work grows by `more`; 0 if no host is priced."""
    if inputs.prices.host == 0.0:
        return 0.0
    work = singles.slot_work[b, slot]
    return waits_for_host(work, inputs) - waits_for_host(work + more, inputs)


@inlined
def _grow(b: int, slot: int, more: float, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Let the work of an open slot grow, or shrink if negative; the caller counts the work itself."""
    singles.free[b] += eased(b, slot, more, inputs, singles)
    if inputs.prices.host > 0.0:
        singles.slot_work[b, slot] += more


@leaf
def put(i: int, b: int, slot: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Put sequence i into a slot; open the slot if it is closed."""
    if singles.slot_tokens[b, slot] == CLOSED:
        singles.slot_tokens[b, slot] = inputs.tokens_per_rank
        singles.free[b] -= inputs.prices.beta + waits_for_host(0.0, inputs)
    singles.slot_tokens[b, slot] -= sequences.tokens[i]
    singles.free[b] -= sequences.work[i]
    _grow(b, slot, sequences.work[i], inputs, singles)
    singles.bin_of[i] = b
    singles.slot_of[i] = slot
    singles.before[i] = END
    singles.after[i] = singles.head[b]
    if singles.head[b] != END:
        singles.before[singles.head[b]] = i
    singles.head[b] = i


@leaf
def take(i: int, sequences: Sequences, inputs: PlannerInputs, singles: SingleRankPacks) -> None:
    """Remove sequence i from its slot; close the slot if it is then empty."""
    b, slot = singles.bin_of[i], singles.slot_of[i]
    singles.slot_tokens[b, slot] += sequences.tokens[i]
    singles.free[b] += sequences.work[i]
    _grow(b, slot, -sequences.work[i], inputs, singles)
    # The whole budget is free again, so the slot is empty.
    if singles.slot_tokens[b, slot] == inputs.tokens_per_rank:
        singles.slot_tokens[b, slot] = CLOSED
        singles.free[b] += inputs.prices.beta + waits_for_host(0.0, inputs)
    if singles.before[i] != END:
        singles.after[singles.before[i]] = singles.after[i]
    else:
        singles.head[b] = singles.after[i]
    if singles.after[i] != END:
        singles.before[singles.after[i]] = singles.before[i]


@leaf
def slot_with_room(b: int, tokens: int, inputs: PlannerInputs, singles: SingleRankPacks) -> int:
    """Return the first open slot of a bin that a sequence of `tokens` can share, or NONE."""
    # Slots count down from the whole budget; sequences that share one must leave this much of it.
    held_back = max(0, inputs.tokens_per_rank - inputs.shared_tokens)
    for slot in range(singles.slot_tokens.shape[1]):
        if singles.slot_tokens[b, slot] >= tokens + held_back:
            return slot
    return NONE


@leaf
def closed_slot(b: int, singles: SingleRankPacks) -> int:
    """Return the first closed slot of a bin, or NONE."""
    for slot in range(singles.slot_tokens.shape[1]):
        if singles.slot_tokens[b, slot] == CLOSED:
            return slot
    return NONE
