"""Partition of items into parts of about equal seconds: differencing, then exchanges, within a token limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fcp_cli.planning.drafts import first_fit_decreasing, members_by_pack, partition
from fcp_cli.util.arrays import FloatArray, IntArray

_MOST_EXCHANGES = 64  # per part


def level_parts(seconds: FloatArray, parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Return the items of each part, heuristically minimizing the seconds of the slowest.

    Args:
        seconds: [items] seconds of each item.
        parts: number of parts, at most that of the items; none is empty.
        equal_counts: whether all parts get equally many items; `parts` must divide their number.
    """
    found = _without_empty(partition(seconds.tolist(), parts, equal_counts=equal_counts))
    return _exchanged(found, seconds, np.zeros(len(seconds), dtype=np.int64), math.inf, moves=not equal_counts)


def level_packs(seconds: FloatArray, tokens: IntArray, packs: int, most_tokens: int) -> list[list[int]] | None:
    """Return the items of each pack, with about equal seconds and at most `most_tokens` tokens, or None if not found.

    Args:
        seconds, tokens: [items] seconds and tokens of each item.
        packs: number of packs, at most that of the items; none is empty.
        most_tokens: token limit of a pack; no item may exceed it.
    """
    found = _without_empty(partition(seconds.tolist(), packs))
    if any(tokens[pack].sum() > most_tokens for pack in found):
        pack_of = first_fit_decreasing(tokens, most_tokens)
        fewest = int(pack_of.max()) + 1
        if fewest > packs:
            return None
        offsets, members = members_by_pack(pack_of, fewest)
        found = [members[start:end].tolist() for start, end in pairwise(offsets.tolist())]
        found = _without_empty(found + [[] for _ in range(packs - fewest)])
    return _exchanged(found, seconds, tokens, most_tokens, moves=True)


def fewest_packs(tokens: IntArray, most_tokens: int) -> int:
    """Return the number of packs that first-fit decreasing needs."""
    return int(first_fit_decreasing(tokens, most_tokens).max()) + 1


def _without_empty(parts: list[list[int]]) -> list[list[int]]:
    """Fill each empty part with half the items of the part that has most; there must be as many items as parts."""
    parts = [list(part) for part in parts]
    for part in parts:
        if not part:
            largest = max(parts, key=len)
            part += [largest.pop() for _ in range(len(largest) // 2)]
    return parts


def _exchanged(
    parts: list[list[int]], seconds: FloatArray, tokens: IntArray, most_tokens: float, *, moves: bool
) -> list[list[int]]:
    """Swap items of the slowest part with faster ones of others, or move items, while that reduces the maximum."""
    total = np.array([seconds[part].sum() for part in parts])
    for _ in range(_MOST_EXCHANGES * len(parts)):
        slowest = int(total.argmax())
        if not any(
            _exchange(parts, total, (slowest, other), seconds, tokens, most_tokens, moves)
            for other in np.argsort(total, kind="stable")[: len(parts)].tolist()
            if other != slowest
        ):
            break
    return parts


def _exchange(
    parts: list[list[int]],
    total: FloatArray,
    pair: tuple[int, int],
    seconds: FloatArray,
    tokens: IntArray,
    most_tokens: float,
    moves: bool,
) -> bool:
    """Apply the best exchange between the slowest part and another; return whether there was one."""
    slow, other = (parts[index] for index in pair)
    gap = total[pair[0]] - total[pair[1]]
    # Column j = len(other) stands for a move without an item in return.
    back_seconds = np.append(seconds[other], 0.0 if moves and len(slow) > 1 else np.inf)
    back_tokens = np.append(tokens[other], 0)
    shift = seconds[slow][:, None] - back_seconds[None, :]
    held = [int(tokens[part].sum()) for part in (slow, other)]
    moved = tokens[slow][:, None] - back_tokens[None, :]
    fits = (held[0] - moved <= most_tokens) & (held[1] + moved <= most_tokens)
    # The new gap is |gap - 2 shift|, which is smaller only if the shift is between 0 and the gap.
    rest = np.where(fits & (shift > 1e-12 * gap) & (shift < gap * (1 - 1e-12)), np.abs(gap - 2 * shift), np.inf)
    best = int(rest.argmin())
    if not np.isfinite(rest.flat[best]):
        return False
    i, j = divmod(best, len(other) + 1)
    total[pair[0]] -= shift[i, j]
    total[pair[1]] += shift[i, j]
    item = slow.pop(i)
    if j < len(other):
        slow.append(other[j])
        other[j] = item
    else:
        other.append(item)
    return True


def slowest_first(parts: Sequence[list[int]], seconds: FloatArray) -> list[list[int]]:
    """Return the parts by descending seconds, with the items of each ascending."""
    order = sorted(range(len(parts)), key=lambda at: (-float(seconds[parts[at]].sum()), at))
    return [sorted(parts[at]) for at in order]
