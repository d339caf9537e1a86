"""Packing by tokens: the classic bin-packing heuristics, in plain Python."""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.plan.pricing.padding import padded_tokens


def min_degrees(tokens: IntArray, tokens_per_rank: int) -> IntArray:
    """Return the fewest ranks that hold each number of tokens (d_min of the papers), at least 1."""
    return np.maximum(1, -(-tokens // tokens_per_rank))


def first_fit_decreasing(tokens: IntArray, group_tokens: int) -> IntArray:
    """Pack like `first_fit`, but longest first."""
    order = np.argsort(-tokens, kind="stable")
    pack_of = np.empty(len(tokens), dtype=np.int64)
    pack_of[order] = first_fit(tokens[order], group_tokens)
    return pack_of


def first_fit(tokens: IntArray, group_tokens: int) -> IntArray:
    """Pack in the order given, each into the first pack with room.

    Args:
        tokens: [n] tokens of each sequence, at most `group_tokens`.
        group_tokens: token budget of a pack's group.

    Returns:
        [n] the pack of each sequence, counted from 0.
    """
    pack_of = np.empty(len(tokens), dtype=np.int64)
    free = np.full(len(tokens), group_tokens, dtype=np.int64)
    for i, size in enumerate(tokens.tolist()):
        pack = int(np.argmax(free >= size))
        pack_of[i] = pack
        free[pack] -= size
    return pack_of


def best_fit_decreasing(
    tokens: IntArray, tokens_per_rank: int, *, padding_multiple: int | None = None
) -> tuple[IntArray, IntArray]:
    """Pack longest first, each into the fullest pack with room, else into a new pack of its d_min ranks.

    This is stage 1 of the FCP paper (section 4.4): a new pack has room for d_min * tokens_per_rank tokens. In a pack of
    d ranks, sequences are padded for degree d. The free room is always a multiple of that padding, so padding never
    makes a sequence too long.

    Returns:
        [n] the pack of each sequence, and [packs] the fewest ranks of each pack.
    """
    pack_of = np.empty(len(tokens), dtype=np.int64)
    degree_of = min_degrees(tokens, tokens_per_rank)
    free: list[int] = []  # ascending; `packs` holds the pack of each entry
    packs: list[int] = []
    degrees: list[int] = []
    for i in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[i])
        at = bisect_left(free, size)
        if at < len(free):
            left, pack = free.pop(at), packs.pop(at)
        else:
            left, pack = int(degree_of[i]) * tokens_per_rank, len(degrees)
            degrees.append(int(degree_of[i]))
        left -= size if padding_multiple is None else int(padded_tokens(size, degrees[pack], padding_multiple))
        pack_of[i] = pack
        at = bisect_left(free, left)
        free.insert(at, left)
        packs.insert(at, pack)
    return pack_of, np.array(degrees, dtype=np.int64)


def spread_evenly(tokens: IntArray, packs: int) -> IntArray:
    """Pack longest first, each into the pack with the fewest tokens so far; return [n] the pack of each."""
    pack_of = np.empty(len(tokens), dtype=np.int64)
    heap = [(0, pack) for pack in range(packs)]
    for i in np.argsort(-tokens, kind="stable").tolist():
        held, pack = heap[0]
        pack_of[i] = pack
        heapq.heapreplace(heap, (held + int(tokens[i]), pack))
    return pack_of


def members_by_pack(pack_of: IntArray, packs: int) -> tuple[IntArray, IntArray]:
    """Return offsets [packs + 1] and members [n]: pack p holds `members[offsets[p]:offsets[p + 1]]`, ascending."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(pack_of, minlength=packs))))
    return offsets, np.argsort(pack_of, kind="stable")
