"""The rules by which sequences that follow each other become global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from fcp_cli.arrays import IntArray

T = TypeVar("T")


def cut_by_count(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield the items in batches of `count`; the last may have fewer."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == count:  # yielded as soon as it is whole: the next item may be long in coming
            yield batch
            batch = []
    if batch:
        yield batch


def cut_by_tokens(items: Iterable[T], most_tokens: int, tokens_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in batches of at most `most_tokens` tokens; one that has more alone is a batch of its own."""
    batch: list[T] = []
    tokens = 0
    for item in items:
        length = tokens_of(item)
        if batch and tokens + length > most_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += length
        if tokens >= most_tokens:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def offsets_by_tokens(length_tokens: IntArray, most_tokens: int) -> IntArray:
    """Return [batches + 1] where the batches of `cut_by_tokens` begin."""
    batches = cut_by_tokens(length_tokens.tolist(), most_tokens, int)
    return np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
