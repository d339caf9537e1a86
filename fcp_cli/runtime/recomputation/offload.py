"""Activation offload: move the inputs of recomputed layers to host memory in forward, and back in backward.

Under recomputation a layer keeps only its input [tokens, width], but a deep model has many layers. While a layer
computes, its input is copied to page-locked memory on a separate stream, and in backward, while a layer computes, the
input of the layer below comes back on another: both directions of the link overlap with the kernels, and as long as a
layer takes longer than a copy, nothing waits (`fcp_cli.cost.offload` prices the waits). The input of the last layer
stays as well: backward needs it first.

    forward    layer  0    1    2    3            backward   layer  3    2    1    0
               out    0    1    2    3                       back   2    1    0

Page-locked memory is not given back to the system but reused by PyTorch's host allocator, which knows when a copy has
finished with it; it rounds sizes up to powers of two. On a CPU the same code makes copies, which proves it right and
saves nothing.
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
    """A micro-batch, of which only the tokens count here."""

    @property
    def input_ids(self) -> Tensor: ...


class ActivationOffload:
    """Offloads the inputs of recomputed layers, of the micro-batches that are long enough to need it.

        offload = ActivationOffload(device, above_tokens=12_000)
        for microbatch in step:
            with offload.of(microbatch):
                loss = microbatch.loss(model(microbatch))  # whose layers run under `recomputed`
            loss.backward()

    Offloading all of them would make short micro-batches wait for copies that they do not need (Ge et al., "ByteScale",
    selective activation offloading). It changes no number, and ranks may differ in it.

    Attributes:
        above_tokens: micro-batches of more tokens on this rank are offloaded: as many as fit without.
        moved_bytes: sent to the host and back so far.
        microbatches: how many were offloaded so far.
    """

    def __init__(self, device: torch.device, *, above_tokens: int = 0) -> None:
        self.above_tokens = above_tokens
        self.moved_bytes = 0
        self.microbatches = 0
        self._link = HostLink() if device.type == "cpu" else StreamLink(device)

    @contextmanager
    def of(self, microbatch: HasTokens) -> Iterator[None]:
        """Offload in the forward inside, if the micro-batch is long enough; the backward may run anywhere."""
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
        """Return whether a tensor that a layer keeps is worth moving: not a weight, an index or a trifle."""
        is_large = tensor.numel() * tensor.element_size() >= LEAST_BYTES
        return is_large and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)


@contextmanager
def offloaded_inputs() -> Iterator[None]:
    """Offload the inputs that a checkpoint inside saves, if the running micro-batch is offloaded."""
    shelf = _shelf.get()
    if shelf is None or not torch.is_grad_enabled():  # a frozen encoder has no backward
        yield
        return
    with saved_tensors_hooks(shelf.put, _get):
        yield


class HostLink:
    """Carries tensors between a device and the host's memory; a mark says when a copy is done.

    Here the device is simulated: the host's memory stands for both.
    """

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start a copy to the host; return it, and its mark."""
        return tensor.clone(), None

    def to_device(self, host: Tensor, written: Any) -> tuple[Tensor, Any]:
        """Start a copy to the device, once the one to the host is done; return it, and its mark."""
        return host.clone(), None

    def wait(self, mark: Any) -> None:
        """Let kernels that are launched from now on wait for a copy."""


class StreamLink(HostLink):
    """Copies on two separate streams; the host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device=device), self._module.Stream(device=device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._out.wait_stream(self._module.current_stream(self._device))  # that computes the tensor
        with self._module.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)  # its memory is not used anew before it has left
        return host, self._out.record_event()

    def to_device(self, host: Tensor, written: Any) -> tuple[Tensor, Any]:
        # Made on the computing stream, so that its memory is of the common pool; kernels may still
        # read the memory's previous content.
        tensor = torch.empty_like(host, device=self._device)
        self._back.wait_stream(self._module.current_stream(self._device))
        self._back.wait_event(written)
        with self._module.stream(self._back):
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._back)  # it may be dropped unused, with the copy under way
        return tensor, self._back.record_event()

    def wait(self, mark: Any) -> None:
        self._module.current_stream(self._device).wait_event(mark)


class _Shelf:
    """The inputs of one micro-batch's layers, in the order of its forward."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        # Weak: autograd holds the slots, and lets go of their memory when the layer's backward is done.
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
    """One input: on the device until the next layer's has come, then on the host, and back when it is asked for."""

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
        """Let go of the device's memory; the copy that is under way keeps it as long as it needs."""
        self._tensor = None

    def come_back(self) -> None:
        """Start the way back, if the tensor has left."""
        if self._tensor is None and self._returning is None:
            self._returning = self._link.to_device(self._host, self._written)
            self._count()

    def get(self) -> Tensor:
        """Return the tensor on the device, and send for the one below, which backward needs next."""
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
