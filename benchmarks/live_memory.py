"""Count the bytes of all storages that are alive, operation by operation, on real or on fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory:
    """Bytes of the storages that operations have made inside `counting`, and the most that were alive at once.

    Memory inside an operation, such as a kernel's workspace, is not seen. Fake tensors have storages of their size
    and take no memory: enter `counting` inside FakeTensorMode.

    Args:
        maker: names who made a storage, from the operation that did; None leaves `peak_makers` empty, which is faster.

    Attributes:
        live_bytes: alive now.
        peak_bytes: most since the start, or since `reset_peak`.
        peak_makers: bytes that were alive at the peak by maker.
    """

    def __init__(self, maker: Callable[[str], str] | None = None) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_makers: Counter[str] = Counter()
        self._maker = maker
        self._live: dict[int, tuple[Any, int, str]] = {}  # by storage: its weak reference, bytes, its maker
        self._is_paused = False

    @contextmanager
    def counting(self) -> Iterator[LiveMemory]:
        """Count tensors made inside the block; frees are seen until this object goes."""
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._live:
                self._set(storage._cdata, storage.nbytes())
            return found

        def uncounted_propagate(*args: Any, **kwargs: Any) -> Any:
            self._is_paused = True
            try:
                return propagate(*args, **kwargs)
            finally:
                self._is_paused = False

        with (
            # FSDP2 frees gathered weights with it, behind the back of every operation.
            patch.object(torch.UntypedStorage, "resize_", counted_resize),
            # DTensor tries each new operation on fake tensors of the global shape.
            patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted_propagate),
            _Watch(self),
        ):
            yield self

    def add(self, tensor: Tensor, operation: str = "") -> None:
        """Count a tensor's storage from now on until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self._is_paused:
            return
        maker = self._maker(operation) if self._maker is not None else ""
        self._live[key] = (weakref.ref(storage, partial(self._freed, key)), 0, maker)
        self._set(key, storage.nbytes())

    def reset_peak(self) -> None:
        """Forget the peak until now."""
        self.peak_bytes = -1
        self._note_peak()

    def _set(self, key: int, num_bytes: int) -> None:
        watch, before, maker = self._live[key]
        self._live[key] = (watch, num_bytes, maker)
        self.live_bytes += num_bytes - before
        self._note_peak()

    def _note_peak(self) -> None:
        if self.live_bytes <= self.peak_bytes:
            return
        self.peak_bytes = self.live_bytes
        if self._maker is not None:
            self.peak_makers = Counter()
            for _, num_bytes, maker in self._live.values():
                self.peak_makers[maker] += num_bytes

    def _freed(self, key: int, _: Any) -> None:
        self.live_bytes -= self._live.pop(key)[1]


class _Watch(TorchDispatchMode):
    """Shows a count the results of every operation."""

    def __init__(self, live: LiveMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls the operations on the local tensors, which come here, too
        result = func(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._memory.add(leaf, str(func))
        return result
