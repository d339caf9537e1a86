"""Which packs are measured: lengths in powers of two and packs of equal and mixed sequences, and others held out."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fcp_cli.errors import UsageError
from fcp_cli.profiling.samples import Point

LEAST_LENGTH = 64


def measurement_points(max_length: int, degrees: Sequence[int], *, crosses_nodes: bool = False) -> list[Point]:
    """The points of one measurement, cheapest first within each round: fitted and held-out ones of every degree.

    Fitted: single sequences of 64, 128, ... max_length tokens and packs of equal sequences. Held out: lengths between
    those, and packs drawn at random (always the same ones).

    Raises:
        UsageError: `max_length` leaves too few lengths to tell the coefficients apart.
    """
    if max_length < 8 * LEAST_LENGTH:
        raise UsageError(f"--max-length is {max_length}; it must be at least {8 * LEAST_LENGTH}")
    fitted = _singles(max_length) + _equal_packs(max_length)
    held_out = _between(max_length) + _random_packs(max_length)
    points = [
        Point(lengths=lengths, degree=degree, held_out=is_held_out, crosses_nodes=crosses_nodes and degree > 1)
        for degree in degrees
        for lengths, is_held_out in [*((pack, False) for pack in fitted), *((pack, True) for pack in held_out)]
    ]
    return sorted(points, key=lambda point: (_work(point), point.key))


def _work(point: Point) -> float:
    return (sum(length * length for length in point.lengths) + 4096 * point.tokens) / point.degree


def _singles(max_length: int) -> list[tuple[int, ...]]:
    lengths: list[tuple[int, ...]] = []
    length = LEAST_LENGTH
    while length < max_length:
        lengths.append((length,))
        length *= 2
    return [*lengths, (max_length,)]


def _equal_packs(max_length: int) -> list[tuple[int, ...]]:
    packs = [(LEAST_LENGTH,) * 8, (max_length // 16,) * 8, (max_length // 16,) * 16, (max_length // 4,) * 3]
    return list(dict.fromkeys(pack for pack in packs if sum(pack) <= max_length))


def _between(max_length: int) -> list[tuple[int, ...]]:
    lengths: list[tuple[int, ...]] = []
    length = 96
    while length < max_length:
        lengths.append((length + length % 7,))
        length *= 2
    return lengths[1:]


def _random_packs(max_length: int, packs: int = 5) -> list[tuple[int, ...]]:
    """Long-tailed packs, the same at every call."""
    draw = random.Random(max_length)
    found = []
    for number in range(packs):
        room = max_length * (number + 1) // packs
        lengths: list[int] = []
        while room >= LEAST_LENGTH and len(lengths) < 12:
            length = min(room, int(LEAST_LENGTH * (max_length / LEAST_LENGTH) ** draw.random()))
            lengths.append(length)
            room -= length
        found.append(tuple(lengths))
    return found
