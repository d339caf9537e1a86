"""Queue of rollouts that forms batches as enough of them arrive."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from fcp_cli.errors import UsageError


class Rollouts:
    """Thread-safe queue of rollouts from generation to training; every pass over it reads the same batches.

    Args:
        fewest: number of rollouts that a batch waits for.
        most: most rollouts of a batch; the others wait for the next one. None: no limit.
        passes: number of passes that will read the batches, after which a batch is dropped. None: unlimited passes, so
            every batch is kept.

    Raises:
        UsageError: the numbers contradict each other.
    """

    def __init__(self, *, fewest: int = 1, most: int | None = None, passes: int | None = None) -> None:
        if fewest < 1 or (most is not None and most < fewest):
            raise UsageError(
                f"fewest is {fewest} and most {most}; a batch has one rollout at least, and most >= fewest"
            )
        if passes is not None and passes < 1:
            raise UsageError(f"passes is {passes}; one at least reads the batches")
        self._fewest, self._most, self._passes = fewest, most, passes
        self._waiting: list[tuple[Any, int]] = []
        self._batches: dict[int, list[tuple[Any, int]]] = {}
        self._made = self._begun = 0
        self._readers: Counter[int] = Counter()
        self._has_ended = False
        self._changed = threading.Condition()

    def add(self, rollout: Any, length_tokens: int) -> None:
        """Add a finished rollout.

        Args:
            rollout: key that is passed to `fetch` to get its tokens.
            length_tokens: tokens of prompt and answer together.

        Raises:
            UsageError: it has no tokens, or the stream was closed by `end`.
        """
        if length_tokens < 1:
            raise UsageError(f"rollout {rollout} has {length_tokens} tokens; one that is empty cannot be trained")
        with self._changed:
            if self._has_ended:
                raise UsageError(f"rollout {rollout} came after end(); no batch would have it")
            self._waiting.append((rollout, length_tokens))
            self._changed.notify_all()

    def end(self) -> None:
        """Close the stream; the remaining rollouts form the last batches."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def batches(self, *, parts: int = 1) -> Iterator[list[tuple[Any, int]]]:
        """Return an iterator over batches of (rollout, tokens) for one pass, a stream for `fcp_cli.runtime.steps`.

        The first pass to request a batch determines it, and all other passes get the same.

        Args:
            parts: number of parts to cut each batch into, in order, for several steps per batch of rollouts.

        Raises:
            UsageError: `parts` is not positive, or there are more passes than announced.
        """
        if parts < 1:
            raise UsageError(f"parts is {parts}; a batch is cut in one at least")
        self._begun += 1
        if self._passes is not None and self._begun > self._passes:
            raise UsageError(f"pass {self._begun} over rollouts for {self._passes}; raise passes= of Rollouts")
        return self._cut(parts)

    def _cut(self, parts: int) -> Iterator[list[tuple[Any, int]]]:
        number = 0
        while (batch := self._batch(number)) is not None:
            bounds = [len(batch) * part // parts for part in range(parts + 1)]
            yield from (batch[start:end] for start, end in pairwise(bounds) if start < end)
            number += 1

    def _batch(self, number: int) -> list[tuple[Any, int]] | None:
        with self._changed:
            while number == self._made:
                if len(self._waiting) >= self._fewest or (self._has_ended and self._waiting):
                    most = self._most or len(self._waiting)
                    self._batches[self._made] = self._waiting[:most]
                    self._waiting = self._waiting[most:]
                    self._made += 1
                elif self._has_ended:
                    return None
                else:
                    self._changed.wait()
            return self._read(number)

    def _read(self, number: int) -> list[tuple[Any, int]]:
        self._readers[number] += 1
        if self._readers[number] != self._passes:
            return self._batches[number]
        del self._readers[number]
        return self._batches.pop(number)
