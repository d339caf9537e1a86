"""Compiled layout of a batch for pipelines, which prefer micro-batches of about equal seconds that follow each other.

`lay` makes micro-batches of a target length; `places` reorders waves by length, in each part of the replicas that no
ring connects to the others (`parts_of`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.compiling import kernel, leaf

ORDERS = 8  # kinds of orders that `places` knows


class Replicas(NamedTuple):
    """Replicas, and the blocks of contiguous replicas that rings may use.

    Attributes:
        num_ranks: number of replicas.
        tokens: token budget of a replica.
        microbatch_seconds: fixed seconds of a micro-batch.
        blocks_of: [degrees + 1] offsets of each degree's blocks in `firsts`; index 0 is degree 1.
        degrees: [degrees] replicas of a block.
        firsts: [blocks] first rank of each block.
    """

    num_ranks: int
    tokens: int
    microbatch_seconds: float
    blocks_of: IntArray
    degrees: IntArray
    firsts: IntArray


class AssignedSequences(NamedTuple):
    """A batch, with the degree chosen for each sequence.

    Attributes:
        order: [sequences] rings by descending degree, then the rest by descending work.
        column: [sequences] index of the degree in `Replicas.degrees`; 0 without a ring.
        seconds: [sequences] seconds as a micro-batch by itself on a block of that degree.
        work, tokens: [sequences] single-rank seconds, and tokens.
    """

    order: IntArray
    column: IntArray
    seconds: FloatArray
    work: FloatArray
    tokens: IntArray


@kernel
def lay(length: float, wait: float, share: float, sequences: AssignedSequences, replicas: Replicas) -> Any:
    """Place each ring on the block that is ready first, and pack all other sequences into micro-batches of `length`.

    Args:
        length: target seconds of a micro-batch without a ring.
        wait: idle time of a replica per second by which its longest micro-batch exceeds `length`; if 0, replicas are
            filled up to equal numbers of micro-batches.
        share: weight of other work on a replica with such idle time, which part of that work fills.
        sequences: sequences to lay out.
        replicas: replicas and blocks.

    Returns:
        (micro-batch of each sequence, [sequences]; wave, first rank and degree of each, [micro-batches]; their number).
    """
    n = len(sequences.order)
    of, wave = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    first, degree = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    turn, ready = np.zeros(replicas.num_ranks, dtype=np.int64), np.zeros(replicas.num_ranks)
    late = np.full(replicas.num_ranks, length)
    count = 0
    while count < n and sequences.column[sequences.order[count]] > 0:
        k = sequences.order[count]
        column = sequences.column[k]
        width, best, at = replicas.degrees[column], np.inf, -1
        for block in range(replicas.blocks_of[column], replicas.blocks_of[column + 1]):
            begin = replicas.firsts[block]
            begins = ready[begin : begin + width].max()
            if begins < best:
                best, at = begins, begin
        wave[count] = turn[at : at + width].max()
        turn[at : at + width] = wave[count] + 1
        for rank in range(at, at + width):
            longer = max(sequences.seconds[k] - late[rank], 0.0)
            late[rank] += longer
            ready[rank] = best + sequences.seconds[k] + wait * longer
        of[k], first[count], degree[count] = count, at, width
        count += 1
    counts = np.ones(replicas.num_ranks)
    for rank in range(replicas.num_ranks):
        if wait > 0.0 and late[rank] > length:
            counts[rank] = share
    members, begins_at = _shared_out(count, length, ready, counts, sequences, replicas)
    least = np.zeros(replicas.num_ranks, dtype=np.int64)
    for rank in range(replicas.num_ranks):
        least[rank] = _packs_of(members[begins_at[rank] : begins_at[rank + 1]], length, sequences, replicas)
    waves = (turn + least).max()
    for rank in range(replicas.num_ranks):
        mine = members[begins_at[rank] : begins_at[rank + 1]]
        packs = max(least[rank], min(waves - turn[rank], len(mine))) if wait == 0.0 else least[rank]
        found = _packed(mine, packs, count, of, sequences, replicas)
        wave[count : count + found] = turn[rank] + np.arange(found)
        first[count : count + found], degree[count : count + found] = rank, 1
        count += found
    return of, wave, first, degree, count


@kernel
def _shared_out(
    rings: int, length: float, ready: FloatArray, share: FloatArray, sequences: AssignedSequences, replicas: Replicas
) -> Any:
    """Assign each sequence without a ring to the rank that is ready first; return them by rank, with offsets.

    Args:
        rings: number of sequences with a ring, which come first.
        length, sequences, replicas: see `lay`.
        ready: [ranks] seconds of the work assigned so far.
        share: [ranks] weight of further work on the rank.
    """
    short = sequences.order[rings:]
    beta = replicas.microbatch_seconds
    overhead = 1.0 + beta / max(length - beta, 1e-12)  # fixed seconds of micro-batches, spread over their work
    heap, ready = _by_falling(-ready), ready.copy()
    rank_of = np.empty(len(short), dtype=np.int64)
    offsets = np.zeros(replicas.num_ranks + 1, dtype=np.int64)
    for at in range(len(short)):
        rank = heap[0]
        ready[rank] += sequences.work[short[at]] * overhead * share[rank]
        _sink(heap, ready)
        rank_of[at] = rank
        offsets[rank + 1] += 1
    for rank in range(replicas.num_ranks):
        offsets[rank + 1] += offsets[rank]
    filled, members = offsets.copy(), np.empty(len(short), dtype=np.int64)
    for at in range(len(short)):
        members[filled[rank_of[at]]] = short[at]
        filled[rank_of[at]] += 1
    return members, offsets


@leaf
def _packs_of(members: IntArray, length: float, sequences: AssignedSequences, replicas: Replicas) -> int:
    """Return the number of micro-batches of about `length` seconds for a rank's sequences; more if tokens need it."""
    work, tokens = 0.0, 0
    for k in members:
        work += sequences.work[k]
        tokens += sequences.tokens[k]
    if len(members) == 0:
        return 0
    return int(max(1, round(work / (length - replicas.microbatch_seconds)), -(-tokens // replicas.tokens)))


@kernel
def _packed(
    members: IntArray, packs: int, number: int, of: IntArray, sequences: AssignedSequences, replicas: Replicas
) -> int:
    """Pack a rank's sequences, by descending work, into balanced micro-batches within its token budget.

    Writes their numbers to `of`, from `number` on, slowest first. Returns the number of micro-batches.
    """
    work, tokens = np.zeros(packs + len(members)), np.zeros(packs + len(members), dtype=np.int64)
    for k in members:
        least, at = np.inf, packs
        for pack in range(packs):
            if work[pack] < least and tokens[pack] + sequences.tokens[k] <= replicas.tokens:
                least, at = work[pack], pack
        packs = max(packs, at + 1)
        work[at] += sequences.work[k]
        tokens[at] += sequences.tokens[k]
        of[k] = at
    by_work = _by_falling(work[:packs])
    place, found = np.zeros(packs, dtype=np.int64), 0
    for pack in by_work:
        if tokens[pack]:
            place[pack] = number + found
            found += 1
    for k in members:
        of[k] = place[of[k]]
    return found


@kernel
def places(kind: int, lasts: FloatArray, is_whole: Any) -> Any:
    """Order the waves of each part of a step by length: ascending up to the longest, then descending.

    Args:
        kind: 0 to ORDERS - 1, selects the waves that come after the longest.
        lasts: [parts, waves] seconds of each wave.
        is_whole: [parts, waves] whether all replicas of the part have work; other waves come last.

    Returns:
        [parts, waves] position of each wave.
    """
    found = np.empty(lasts.shape, dtype=np.int64)
    for part in range(len(lasts)):
        falling = _by_falling(lasts[part])
        count, after = is_whole[part].sum(), 0
        nth, front, back = -1, 0, count - 1
        for wave in falling[::-1]:  # shortest first, filling positions from both ends
            if not is_whole[part, wave]:
                continue
            nth += 1
            at = count - 2 - nth  # rank by length, with 0 for the second longest
            is_after = (
                (kind == 0 and at % 3 == 2)
                or kind == 2
                or (kind == 3 and at % 2 == 1)
                or (kind == 4 and at % 3 == 1)
                or (kind == 5 and at >= count - 1 - (count - 1) // 3)
                or (kind == 6 and at % 2 == 0)
                or (kind == 7 and nth > 0)
            )
            if is_after and at >= 0:
                found[part, wave] = back
                back -= 1
            else:
                found[part, wave] = front
                front += 1
        for wave in range(lasts.shape[1]):
            if not is_whole[part, wave]:
                found[part, wave] = count + after
                after += 1
    return found


@kernel
def parts_of(count: int, rank_offsets: IntArray, ranks: Any) -> IntArray:
    """Return [replicas] the index of each replica's part: the connected components of replicas that share rings."""
    part = np.arange(count)
    for ring in range(len(rank_offsets) - 1):
        first, stop = rank_offsets[ring], rank_offsets[ring + 1]
        lowest = count
        for at in range(first, stop):
            lowest = min(lowest, _root(ranks[at], part))
        for at in range(first, stop):
            part[_root(ranks[at], part)] = lowest
    number, found = np.full(count, -1), 0
    for rank in range(count):
        root = _root(rank, part)
        if number[root] < 0:
            number[root] = found
            found += 1
        part[rank] = root
    for rank in range(count):
        part[rank] = number[part[rank]]
    return part


@leaf
def _root(rank: int, part: IntArray) -> int:
    while part[rank] != rank:
        rank = part[rank]
    return rank


@kernel
def _by_falling(values: FloatArray) -> IntArray:
    """Return the indices of a few values, largest first; `np.argsort` would take a second to compile."""
    order = np.empty(len(values), dtype=np.int64)
    for k in range(len(values)):
        at = k
        while at > 0 and values[order[at - 1]] < values[k]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = k
    return order


@leaf
def _sink(heap: IntArray, ready: FloatArray) -> None:
    """Sift down the root of a min-heap of ranks by `ready`, after its value has increased."""
    at, rank = 0, heap[0]
    while 2 * at + 1 < len(heap):
        child = 2 * at + 1
        if child + 1 < len(heap) and ready[heap[child + 1]] < ready[heap[child]]:
            child += 1
        if ready[heap[child]] >= ready[rank]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = rank
