"""Activation offload: move the inputs of recomputed layers to host memory in forward, and back in backward.

With recomputation a layer only saves its input [tokens, width], but a deep model has many layers. While a layer
computes, its input is copied to pinned memory on a separate stream. In backward, while a layer computes, the input of
the layer below is copied back on another stream. Both directions of the link overlap with kernels, and nothing waits as
long as a layer takes longer than a copy (`fcp_cli.cost.offload` prices the waits). The last layer's input also stays on
the device, since backward needs it first.

    forward    layer  0    1    2    3            backward   layer  3    2    1    0
               out    0    1    2    3                       back   2    1    0

Pinned memory is not returned to the system but reused by PyTorch's host allocator, which tracks when copies have
finished and rounds sizes up to powers of two. On a CPU the same code makes copies, which saves nothing but tests it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: they save little, and a copy has a fixed cost."""


class HasTokens(Protocol):
    """Micro-batch, of which only the number of tokens is used."""

    @property
    def input_ids(self) -> Tensor: ...


class ActivationOffload:
    """Offloads the inputs of recomputed layers in micro-batches that are long enough to need it.

        offload = ActivationOffload(device, above_tokens=12_000)
        for microbatch in step:
            with offload.of(microbatch):
                loss = microbatch.loss(model(microbatch))  # whose layers run under `recomputed`
            loss.backward()

    Offloading short micro-batches would make them wait for copies that they do not need (Ge et al., "ByteScale",
    selective activation offloading). Results are unchanged, and ranks may differ in their settings.

    Attributes:
        above_tokens: micro-batches with more tokens on this rank are offloaded: the maximum that fits without offload.
        moved_bytes: bytes copied to the host and back so far.
        microbatches: number of offloaded micro-batches so far.
    """

    def __init__(self, device: torch.device, *, above_tokens: int = 0) -> None:
        self.above_tokens = above_tokens
        self.moved_bytes = 0
        self.microbatches = 0
        self._link = HostLink() if device.type == "cpu" else StreamLink(device)

    @contextmanager
    def of(self, microbatch: HasTokens) -> Iterator[None]:
        """Offload during the forward in this block if the micro-batch is long enough; backward may run anywhere."""
        if microbatch.input_ids.numel() <= self.above_tokens:
            yield
            return
        self.microbatches += 1
        token = _shelf.set(_Shelf(self))
        try:
            yield
        finally:
            _shelf.reset(token)

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is worth moving: floating-point, large, and not a parameter."""
        is_large = tensor.numel() * tensor.element_size() >= LEAST_BYTES
        return is_large and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)


@contextmanager
def offloaded_inputs() -> Iterator[None]:
    """Offload the inputs saved by a checkpoint in this block, if the current micro-batch is offloaded."""
    shelf = _shelf.get()
    if shelf is None or not torch.is_grad_enabled():  # e.g. a frozen encoder, which has no backward
        yield
        return
    with saved_tensors_hooks(shelf.put, _get):
        yield


class HostLink:
    """Copies tensors between device and host memory; a mark tells when a copy is done.

    This base class is for CPUs, where host memory simulates the device.
    """

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start a copy to the host; return the copy and its mark."""
        return tensor.clone(), None

    def to_device(self, host: Tensor, written: Any) -> tuple[Tensor, Any]:
        """Start a copy to the device after the copy to the host has finished; return the copy and its mark."""
        return host.clone(), None

    def wait(self, mark: Any) -> None:
        """Make kernels that are launched from now on wait for a copy."""


class StreamLink(HostLink):
    """Copies on two separate streams; the host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device=device), self._module.Stream(device=device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._out.wait_stream(self._module.current_stream(self._device))  # which computes the tensor
        with self._module.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)  # its memory must not be reused before it is copied
        return host, self._out.record_event()

    def to_device(self, host: Tensor, written: Any) -> tuple[Tensor, Any]:
        # Allocated on the compute stream, from the common memory pool; kernels may still be reading its previous
        # content.
        tensor = torch.empty_like(host, device=self._device)
        self._back.wait_stream(self._module.current_stream(self._device))
        self._back.wait_event(written)
        with self._module.stream(self._back):
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._back)  # it may be freed unused while the copy is in flight
        return tensor, self._back.record_event()

    def wait(self, mark: Any) -> None:
        self._module.current_stream(self._device).wait_event(mark)


class _Shelf:
    """Inputs of one micro-batch's layers, in forward order."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        # Weak: autograd owns the slots, and frees their memory when the layer's backward is done.
        self._slots: list[weakref.ref[_Slot]] = []

    def put(self, tensor: Tensor) -> Tensor | _Slot:
        if not self.offload.takes(tensor):
            return tensor
        below = self.slot(len(self._slots) - 1)
        if below is not None:
            below.leave()
        slot = _Slot(self, len(self._slots), tensor.detach())
        self._slots.append(weakref.ref(slot))
        return slot

    def slot(self, place: int) -> _Slot | None:
        return self._slots[place]() if 0 <= place < len(self._slots) else None


class _Slot:
    """One input: on the device until the next layer's input arrives, then on the host, and back on request."""

    def __init__(self, shelf: _Shelf, place: int, tensor: Tensor) -> None:
        self._shelf = shelf
        self._place = place
        self._tensor: Tensor | None = tensor
        self._returning: tuple[Tensor, Any] | None = None
        self._host, self._written = self._link.to_host(tensor)
        self._count()

    @property
    def _link(self) -> HostLink:
        return self._shelf.offload._link

    def leave(self) -> None:
        """Release the device memory; a copy in flight keeps it as long as needed."""
        self._tensor = None

    def come_back(self) -> None:
        """Start the copy back, if the tensor has left the device."""
        if self._tensor is None and self._returning is None:
            self._returning = self._link.to_device(self._host, self._written)
            self._count()

    def get(self) -> Tensor:
        """Return the tensor on the device, and prefetch the one below, which backward needs next."""
        self.come_back()
        tensor = self._tensor if self._returning is None else self._take()
        below = self._shelf.slot(self._place - 1)
        if below is not None:
            below.come_back()
        assert tensor is not None
        return tensor

    def _take(self) -> Tensor:
        assert self._returning is not None
        tensor, mark = self._returning
        self._returning = None
        self._link.wait(mark)
        return tensor

    def _count(self) -> None:
        self._shelf.offload.moved_bytes += self._host.numel() * self._host.element_size()


def _get(kept: Tensor | _Slot) -> Tensor:
    return kept.get() if isinstance(kept, _Slot) else kept


_shelf: ContextVar[_Shelf | None] = ContextVar("offload_shelf", default=None)
