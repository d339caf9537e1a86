"""One degree for a whole step: how `static` packs and shares out, and which of its answers is quickest.

No array overflows: there are at most as many packs as sequences, and every group is one of num_ranks // degree.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.planning.compiled.compiling import inlined, kernel
from fcp_cli.planning.compiled.core import (
    NONE,
    Machine,
    Sequences,
    first_with_room,
    make_tree,
    pack_seconds,
    padded_for,
    roomiest,
    set_room,
    total_of,
)

_MARGIN = 1e-9  # relative; by so much a bound may be rounded up


@kernel
def longest_first(sequences: Sequences) -> IntArray:
    """Return [sequences] positions by falling tokens, ties by position."""
    return np.argsort(-sequences.tokens, kind="mergesort")


@kernel
def full_packs(group_tokens: int, by_tokens: IntArray, sequences: Sequences) -> Any:
    """Pack first-fit decreasing; return [sequences] pack of each sequence, and the number of packs."""
    pack_of = np.empty(len(by_tokens), dtype=np.int64)
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
    return -(-packs // groups) * groups


@kernel
def even_packs(packs: int, group_tokens: int, by_tokens: IntArray, sequences: Sequences) -> Any:
    """Pack longest first, each into the pack with fewest tokens; return as `full_packs`, 0 packs if one overflows."""
    pack_of = np.empty(len(by_tokens), dtype=np.int64)
    tree = make_tree(packs)
    leaf = len(tree.seconds) >> 1
    for pack in range(packs):
        set_room(tree, pack, 0.0, 0)
    for i in by_tokens:
        pack = roomiest(tree)
        left = tree.seconds[leaf + pack] - sequences.tokens[i]
        if -left > group_tokens:
            return pack_of, 0
        pack_of[i] = pack
        set_room(tree, pack, left, 0)
    return pack_of, min(packs, len(by_tokens))


@kernel
def _padded_for_all(degree: int, sequences: Sequences, machine: Machine) -> Any:
    """Return the sequences with the padding that groups of this degree need."""
    n = len(sequences.work)
    padded = Sequences(np.empty(n), np.empty(n), np.empty(n), np.empty(n, dtype=np.int64))
    for i in range(n):
        attention, linear, tokens = padded_for(
            sequences.attention[i], sequences.linear[i], sequences.tokens[i], degree, machine
        )
        padded.attention[i], padded.linear[i], padded.tokens[i] = attention, linear, tokens
        padded.work[i] = attention + linear
    return padded


@kernel
def share_out(degree: int, waves: bool, pack_of: IntArray, packs: int, sequences: Sequences, machine: Machine) -> Any:
    """Give the packs to the groups, longest first: under waves in turns, else each to the group that is free first.

    Group g has the ranks from g * degree on; the sequences are padded for that degree.

    Returns:
        Predicted seconds of the step, [packs] packs in that order, and [packs] the group of each of them.
    """
    attention, linear, tokens = np.zeros(packs), np.zeros(packs), np.zeros(packs, dtype=np.int64)
    for i in range(len(pack_of)):
        attention[pack_of[i]] += sequences.attention[i]
        linear[pack_of[i]] += sequences.linear[i]
        tokens[pack_of[i]] += sequences.tokens[i]
    # Groups of a degree that does not divide a node lie partly across two: packs are ranked as if all did.
    crosses = machine.ranks_per_node % degree != 0
    seconds = np.empty(packs)
    for p in range(packs):
        seconds[p] = pack_seconds(attention[p], linear[p], tokens[p], degree, crosses, machine)
    by, group_of = np.argsort(-seconds, kind="mergesort"), np.empty(packs, dtype=np.int64)
    groups = machine.num_ranks // degree
    ends, expected = np.zeros(groups), make_tree(groups)
    for group in range(groups):
        set_room(expected, group, 0.0, 0)
    done, longest = 0.0, 0.0
    for k in range(packs):
        p = by[k]
        group = k % groups if waves else roomiest(expected)
        group_of[k] = group
        first = group * degree
        crosses = first // machine.ranks_per_node != (first + degree - 1) // machine.ranks_per_node
        taken = pack_seconds(attention[p], linear[p], tokens[p], degree, crosses, machine)
        if waves:
            if group == 0:
                done += longest
                longest = machine.floor
            longest = max(longest, taken)
        else:
            ends[group] += taken
            set_room(expected, group, expected.seconds[(len(expected.seconds) >> 1) + group] - seconds[p], 0)
    return (done + longest if waves else ends.max()), by, group_of


@inlined
def _at_least(degree: int, attention: float, linear: float, tokens: int, machine: Machine) -> float:
    """Return the least seconds of so much work on groups of one degree: all busy, packs as few as tokens allow."""
    traffic = (machine.inter if degree > machine.ranks_per_node else min(machine.intra, machine.inter)) * (degree - 1)
    packs = max(1.0, tokens / (degree * machine.tokens_per_rank))
    ring = traffic * tokens + machine.hop * (degree - 1) * degree * packs
    hidden = max(attention, (1.0 - machine.exposed) * ring) if degree > 1 else attention
    return (machine.beta * degree * packs + linear + hidden + machine.exposed * ring) / machine.num_ranks


@inlined
def _alone(i: int, degree: int, sequences: Sequences, machine: Machine) -> float:
    """Return the least seconds of a pack that holds this sequence."""
    crosses = degree > machine.ranks_per_node or machine.inter < machine.intra
    return pack_seconds(sequences.attention[i], sequences.linear[i], sequences.tokens[i], degree, crosses, machine)


@kernel
def quickest(seconds: float, degrees: IntArray, waves: bool, sequences: Sequences, machine: Machine) -> Any:
    """Return the degree that takes fewer than these seconds and fewest of all: seconds, degree, whether packs are even.

    Degree 0: none does. A degree is left out unseen where its work, or its longest sequence, takes as long.
    """
    best_degree, best_even = 0, False
    by_tokens = longest_first(sequences)
    attention, linear, tokens = total_of(sequences.attention), total_of(sequences.linear), sequences.tokens.sum()
    for degree in degrees:
        group_tokens = degree * machine.tokens_per_rank
        if sequences.tokens[by_tokens[0]] > group_tokens:
            continue
        least = max(
            _at_least(degree, attention, linear, tokens, machine), _alone(by_tokens[0], degree, sequences, machine)
        )
        if least * (1.0 - _MARGIN) >= seconds:
            continue
        padded, longest = sequences, by_tokens
        if machine.padding:
            padded = _padded_for_all(degree, sequences, machine)
            longest = longest_first(padded)
        pack_of, packs = full_packs(group_tokens, longest, padded)
        groups = machine.num_ranks // degree
        for even in (False, True):
            if even:
                pack_of, packs = even_packs(even_count(packs, groups), group_tokens, longest, padded)
            if packs == 0:
                continue
            found, _by, _group_of = share_out(degree, waves, pack_of, packs, padded, machine)
            if found < seconds:
                seconds, best_degree, best_even = found, degree, even
    return seconds, best_degree, best_even
