"""Run an iterator in a background thread, a bounded number of items ahead of its consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetched(Generic[T]):
    """Iterator over `items` in order, produced in a background thread; its exceptions are raised at their position.

    At most `depth` items are buffered, plus the one being made. With `depth=0` there is no thread and items are made on
    request. `close` ends the thread; as a daemon, it never blocks interpreter exit.
    """

    def __init__(self, items: Iterable[T], *, depth: int, name: str) -> None:
        self._items: Iterator[T] = iter(items)
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._finished = False
        self._closed = False
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._produce, name=name, daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            return next(self._items)
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """Stop making items and drop the buffered ones."""
        with self._changed:
            self._closed = self._finished = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()  # afterwards `items` no longer runs, and files that it reads may be closed

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._offer(item):
                    return
        except BaseException as error:  # of any kind, or the consumer would wait for a dead thread
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _offer(self, item: T) -> bool:
        """Append an item once there is room; return False if the consumer has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify_all()
            return True
