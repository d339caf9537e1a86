"""The largest differencing method of Karmarkar and Karp (1982) for any number of parts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

_Part: TypeAlias = tuple[float, list[int]]  # weight, items


def partition(weights: Sequence[float], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Split items into parts so that the heaviest part is as light as the heuristic finds.

    Args:
        weights: weight of each item, >= 0.
        parts: number of parts, >= 1.
        equal_counts: keep the item counts of any two parts within one of each other.

    Returns:
        The items of each part, heaviest part first; parts beyond the number of items are empty.
    """
    order = sorted(range(len(weights)), key=lambda item: -weights[item])
    at_once = parts if equal_counts else 1
    # A partial answer lists its non-empty parts, heaviest first. With `equal_counts` it starts with an item in each.
    answers = [[(weights[i], [i]) for i in order[first : first + at_once]] for first in range(0, len(order), at_once)]
    heap = [(-_spread(answer, parts), serial, answer) for serial, answer in enumerate(answers)]
    heapq.heapify(heap)
    for serial in range(len(heap), 2 * len(heap) - 1):
        widest, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = _merge(widest, second, parts)
        heapq.heappush(heap, (-_spread(merged, parts), serial, merged))
    filled = [items for _weight, items in heap[0][2]] if heap else []
    return filled + [[] for _ in range(parts - len(filled))]


def _spread(answer: Sequence[_Part], parts: int) -> float:
    return answer[0][0] - (answer[-1][0] if len(answer) == parts else 0.0)


def _merge(a: Sequence[_Part], b: Sequence[_Part], parts: int) -> list[_Part]:
    """Merge two partial answers: the heaviest part of one with the lightest of the other, and so on.

    Parts that an answer does not list are empty, so the heaviest ones of the other may stay alone.
    """
    alone_a, alone_b = max(parts - len(b), 0), max(parts - len(a), 0)
    joined = [*a[:alone_a], *b[:alone_b]]
    for one, other in zip(a[alone_a:], reversed(b[alone_b:]), strict=True):
        joined.append((one[0] + other[0], one[1] + other[1]))
    return sorted(joined, key=lambda part: -part[0])
