"""Counts the work of a template: characters, items, loop iterations, calls.

A sandbox does not limit time and memory: `"a" * 10**10` is harmless Python. Counts are deterministic and the same on
every machine, so that ranks agree on whether a row is rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

# Rendering may take some twenty passes over a conversation; no template needs ten times that.
WORK_BASE: Final = 5_000_000
WORK_PER_UNIT: Final = 200
VALUE_BASE: Final = 2_000_000
VALUE_PER_UNIT: Final = 16
ITERATION: Final = 20
CALL: Final = 40
ITEM: Final = 16
MOST_DEPTH: Final = 100
MOST_BITS: Final = 4096

_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_SEQUENCES: Final = (list, tuple, set, frozenset, *_VIEWS)


class WorkLimitError(Exception):
    """A template does too much work or creates too large a value for its input."""


class RenderingLimit:
    """Work budget of a rendering.

    Args:
        given: values of the template; the budget grows with their size.
    """

    __slots__ = ("left", "most")

    def __init__(self, given: Any) -> None:
        items, characters = measured(given, most=1 << 40)
        self.left = WORK_BASE + WORK_PER_UNIT * (items + characters)
        self.most = VALUE_BASE + VALUE_PER_UNIT * (items + characters)

    def spend(self, units: int) -> None:
        """Spend work units; raise WorkLimitError if none are left."""
        self.left -= units
        if self.left < 0:
            raise WorkLimitError("it takes too much work: loops too often, or over too much text")

    def read(self, value: Any) -> Any:
        """Count a value with all nested items and characters as work, and return it."""
        kind = type(value)
        if kind is str:
            self.spend(len(value))
        elif kind is not bool and value is not None:
            items, characters = measured(value, most=self.left)
            self.spend(ITEM * items + characters)
        return value

    def allow(self, size: int) -> None:
        """Count a value of `size` characters and items before creating it."""
        self.fit(size)
        self.spend(size)

    def fit(self, size: int) -> None:
        if size > self.most:
            raise WorkLimitError(f"it makes a text or list of more than {self.most:,} characters")

    def allow_bits(self, bits: int) -> None:
        if bits > MOST_BITS:
            raise WorkLimitError(f"it makes a number of more than {MOST_BITS} bits")

    def made(self, value: Any) -> Any:
        """Count a new value and return it; items of an iterator are counted when taken."""
        kind = type(value)
        if kind is str:
            self.allow(len(value))
        elif kind is int:
            self.allow_bits(value.bit_length())
        elif isinstance(value, (str, dict, *_SEQUENCES)):
            items, characters = measured(value, most=self.most)
            self.spend(ITEM * items)
            self.fit(items + characters)
        elif isinstance(value, Iterator):
            return self.counted(value)
        return value

    def counted(self, values: Iterable[Any], cost: int = ITERATION) -> Iterator[Any]:
        """Yield values, spending `cost` for each."""
        for value in values:
            self.spend(cost)
            yield value


class CountedLoop:
    """Iterable for a `for` loop that counts iterations; has a length if `values` has."""

    __slots__ = ("cost", "values", "work")

    def __init__(self, values: Any, work: RenderingLimit, cost: int) -> None:
        self.values, self.work, self.cost = values, work, cost

    def __iter__(self) -> Iterator[Any]:
        return self.work.counted(self.values, self.cost)

    def __len__(self) -> int:
        return len(self.values)


def measured(value: Any, *, most: int) -> tuple[int, int]:
    """Return (items, characters) of a value, counting shared parts at every occurrence.

    Stops soon after the sum exceeds `most`, so that values with shared parts cost no more than that.
    """
    items, characters = 0, 0
    waiting: list[tuple[Any, int]] = [((value,), 0)]
    while waiting:
        holder, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise WorkLimitError(f"it nests lists more than {MOST_DEPTH} deep")
        for inner in holder:
            items += 1
            if isinstance(inner, str):
                characters += len(inner)
            elif isinstance(inner, dict):
                waiting.append((inner.keys(), depth + 1))
                waiting.append((inner.values(), depth + 1))
            elif isinstance(inner, _SEQUENCES):
                waiting.append((inner, depth + 1))
            elif isinstance(inner, range):
                items += len(inner)
            elif isinstance(inner, int):
                characters += inner.bit_length() >> 2
        if items + characters > most:
            break
    return items, characters
