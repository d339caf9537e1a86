"""Rules that cut a stream of sequences into global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from fcp_cli.arrays import IntArray

T = TypeVar("T")


def cut_by_count(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield batches of `count` items; the last may have fewer."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == count:  # yield before fetching the next item, which may block
            yield batch
            batch = []
    if batch:
        yield batch


def cut_by_tokens(items: Iterable[T], most_tokens: int, tokens_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield batches of at most `most_tokens` tokens; an item that exceeds them is a batch by itself."""
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
    """Return [batches + 1] the offsets of the batches of `cut_by_tokens`."""
    batches = cut_by_tokens(length_tokens.tolist(), most_tokens, int)
    return np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)
