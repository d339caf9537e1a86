"""Activation checkpointing: recompute a whole layer, all but its attention, or only elementwise operations.

Backward needs a layer's activations. With full recomputation a layer saves only its inputs and reruns forward in
backward, including its ring: the keys and values of the whole group travel again. `keep_attention` also saves the
results of attention, so that only local work reruns. `keep_products` also saves the outputs of matrix products, so that
only norms, rotary embeddings and activation functions rerun, which take little time but most of the memory.

    saved per layer, T tokens, width W, H query heads and G key/value heads of size D
    full         its inputs                                                [T, W]
    selective    its inputs, and of attention q, k, v, out and lse         [T, W + 2 H D + 2 G D], lse [T, H]
    elementwise  the same, and the outputs of all matrix products but the last

Attention and state layers run through `staged_call`; this module does not depend on rings.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fcp_cli.cost.levels import RecomputeLevel, layers_by_level, whole_layers
from fcp_cli.cost.recipe import LayerRecompute
from fcp_cli.errors import RunError

attention_stage: ContextVar[_Stage | None] = ContextVar("attention_stage", default=None)
"""How attention runs in the layer that is computed now, the first time or again; None for a plain forward."""


def staged_call(compute: Callable[[], Tensor]) -> Tensor:
    """Return the output of a call, or the output kept from the first forward if its layer is being recomputed."""
    stage = attention_stage.get()
    return compute() if stage is None else stage.attend(compute)


class _Output(NamedTuple):
    """Output of one attention call of the first forward."""

    out: Tensor
    requires_grad: bool


def recomputed(
    layer: Callable[..., Any], *args: Any, keeps_attention: bool = False, keeps_products: bool = False, **kwargs: Any
) -> Any:
    """Run a layer under activation checkpointing.

    Inside `ActivationOffload.of`, its inputs are offloaded to host memory until backward.

    Args:
        layer: called with `args` and `kwargs`; pass inputs that need gradients in `args`.
        keeps_attention: save the results of attention (`keep_attention`).
        keeps_products: save these and the outputs of matrix products (`keep_products`).
    """
    contexts = keep_products if keeps_products else keep_attention if keeps_attention else noop_context_fn
    with offloaded_inputs():  # outside the checkpoint's own hooks, so only the checkpoint's inputs get here
        return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts for forward and recomputation of a layer that saves its attention.

    Pass it as `context_fn` to a non-reentrant checkpoint:

        checkpoint(layer, hidden, use_reentrant=False, context_fn=keep_attention)

    The first forward saves the tensors that attention's backward needs (q, k, v, output and lse). When the layer is
    recomputed, attention returns the saved output: no kernel runs and nothing travels around the ring. A layer may
    attend several times, in the same order both times. Gradients equal those without recomputation, bitwise if the
    layer's other operations are deterministic.
    """
    outputs: list[_Output] = []
    return _Keeping(outputs), _HandingOut(outputs)


def keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a layer that saves its attention and the outputs of its matrix products.

    Use it like `keep_attention`. When the layer is recomputed, only elementwise operations run: a matrix product
    returns its saved output. A layer's last product is not saved, since backward rarely needs its output, and is rerun
    if it does. The exception are grouped experts, whose output is needed for the gradients of routing weights.
    """
    outputs: list[_Output] = []
    products: list[_Product] = []
    return _Keeping(outputs, _KeepingProducts(products)), _HandingOut(outputs, _HandingOutProducts(products))


class _Stage(ABC):
    """How attention calls run inside a `with` block, which may be entered repeatedly."""

    def __init__(self, outputs: list[_Output], products: _ProductMode | None = None) -> None:
        self._outputs = outputs
        self._products = products
        self._tokens: list[Token[_Stage | None]] = []

    @abstractmethod
    def attend(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of one call, which `compute` runs."""

    def __enter__(self) -> None:
        self._tokens.append(attention_stage.set(self))
        if self._products is not None:
            self._products.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._products is not None:
            self._products.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        attention_stage.reset(self._tokens.pop())


class _Keeping(_Stage):
    def attend(self, compute: Callable[[], Tensor]) -> Tensor:
        # The checkpoint's hooks would drop the tensors that attention saves; these inner hooks keep them.
        with saved_tensors_hooks(_keep, _unchanged), self._products.paused() if self._products else nullcontext():
            token = attention_stage.set(None)  # nested attention calls are part of this one
            try:
                out = compute()
            finally:
                attention_stage.reset(token)
        self._outputs.append(_Output(out.detach(), out.requires_grad))
        return out


class _HandingOut(_Stage):
    def __init__(self, outputs: list[_Output], products: _ProductMode | None = None) -> None:
        super().__init__(outputs, products)
        self._calls = 0

    def __enter__(self) -> None:
        self._calls = 0  # backward may run twice (retain_graph)
        super().__enter__()

    def attend(self, compute: Callable[[], Tensor]) -> Tensor:
        if self._calls == len(self._outputs):
            raise RunError(
                f"a layer called attention {len(self._outputs)} times in forward and more often when it was computed "
                "again; recompute it whole, without keep_attention"
            )
        out, requires_grad = self._outputs[self._calls]
        self._calls += 1
        # Must match the first output's requires_grad: otherwise later operations would save different tensors.
        return out.detach().requires_grad_(requires_grad)


class _Product(NamedTuple):
    """Output of one matrix product of the first forward, with its version counter at that time."""

    operator: Any
    out: Tensor
    version: int


_GROUPED: Final = getattr(torch.ops.aten, "_grouped_mm", None)  # matrix products of experts
_SINGLE: Final = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))
_PRODUCTS: Final = frozenset((*_SINGLE, *([_GROUPED.default] if _GROUPED is not None else [])))


class _ProductMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts each matrix product of a layer below autograd."""

    def __init__(self, products: list[_Product]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = products
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore matrix products in this block: those inside attention."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS or self._is_paused:
            return func(*args, **kwargs or {})
        return self.product(func, args, kwargs or {})

    def product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Return the output of a matrix product, computed or saved."""
        raise NotImplementedError


class _KeepingProducts(_ProductMode):  # type: ignore[no-untyped-call]
    def product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        out: Tensor = func(*args, **kwargs)
        self.products.append(_Product(func, _alias(out), out._version))
        return out

    def __exit__(self, *raised: Any) -> None:
        if self.products and self.products[-1].operator in _SINGLE:
            self.products.pop()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


class _HandingOutProducts(_ProductMode):  # type: ignore[no-untyped-call]
    def __enter__(self) -> Any:
        self._calls = 0  # backward may run twice (retain_graph)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        if self._calls == len(self.products):
            out: Tensor = func(*args, **kwargs)
            return out
        operator, out, version = self.products[self._calls]
        self._calls += 1
        if operator is not func:
            raise RunError(
                f"a layer ran {operator} in forward and {func} in its place when it was computed again; recompute it "
                "with keep_attention, or whole"
            )
        return _alias(_unchanged((out, version), "the output of a matrix product"))


def _alias(tensor: Tensor) -> Tensor:
    """Return the tensor without its autograd node, sharing its version counter."""
    # Without the guard, a view made below autograd would count its in-place changes separately.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unchanged(kept: tuple[Tensor, int], what: str = "an input of attention") -> Tensor:
    """Return a saved tensor if it is unchanged; PyTorch does not check tensors saved through hooks."""
    tensor, version = kept
    if tensor._version != version:
        raise RunError(
            f"{what} was changed in place after the call, and its backward would use it changed; write the operation "
            "without '_', or recompute the layer whole, without keep_attention and keep_products"
        )
    return tensor


# Recomputation as needed: each rank recomputes as many layers as its micro-batch's tokens require.
#
# A layer's level is chosen at each call, by the number of input tokens, and kept with the call, so a micro-batch is
# recomputed as it ran, regardless of later micro-batches. No level reruns attention, so ranks of a ring may use
# different levels, and messages are the same as without recomputation.


class LayerLevels:
    """Recompute levels of a model's layers.

        levels = LayerLevels(session.recompute_levels, layers=len(blocks))
        for index, block in enumerate(blocks):
            hidden = levels.run(index, block, hidden, position_ids)

    A block that can recompute only its activation function checks `LayerLevels.recomputes_activation`.

    Args:
        levels: recompute levels of the plan.
        layers: number of layers of the model.
        tokens_per_row: tokens of the rank per row of a layer's input; above 1 if devices share them.
        share: fraction of layers to recompute in every micro-batch, on a pipeline stage; None: by its tokens.
    """

    def __init__(
        self,
        levels: Sequence[RecomputeLevel],
        *,
        layers: int,
        tokens_per_row: int = 1,
        share: float | None = None,
    ) -> None:
        self._share = share
        self._levels = tuple(levels)
        self._layers = layers
        self._tokens_per_row = tokens_per_row

    def level(self, index: int, tokens: int) -> LayerRecompute:
        """Return the level of a layer in a micro-batch of `tokens` tokens on this rank."""
        if self._share is None:
            number, count = layers_by_level(self._levels, tokens, self._layers)
        else:
            number, count = len(self._levels) - 1, whole_layers(self._share, self._layers)
        return self._levels[number if index < count else number - 1].recompute

    def run(self, index: int, layer: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a layer at its level.

        Args:
            index: index of the layer in the model, from 0.
            layer: called with `hidden`, `args` and `kwargs`.
            hidden: [..., T, width] of T rows of tokens, with any other dimensions of size 1.
        """
        level = self.level(index, hidden.shape[:-1].numel() * self._tokens_per_row)
        if level in ("none", "activation"):
            token = _recomputes_activation.set(level == "activation")
            try:
                return layer(hidden, *args, **kwargs)
            finally:
                _recomputes_activation.reset(token)
        keeps = {"keeps_attention": level == "selective", "keeps_products": level == "elementwise"}
        return recomputed(layer, hidden, *args, **keeps, **kwargs)

    @staticmethod
    def attend(compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of an attention that is not fcp's, kept if its layer keeps attention."""
        return staged_call(compute)

    @staticmethod
    def recompute_activation(mlp: nn.Module, *, always: bool = False) -> None:
        """Make an MLP save only its input and the outputs of its matrix products during training.

        Args:
            mlp: module whose forward is replaced.
            always: whether to do so at every level; else only in layers at level `activation`.
        """
        mlp.forward = partial(_run_mlp, mlp, mlp.forward, always)

    @staticmethod
    def recomputes_activation() -> bool:
        """Return whether the current layer recomputes only its activation function."""
        return _recomputes_activation.get()


def _run_mlp(mlp: nn.Module, forward: Callable[..., Any], always: bool, *args: Any, **kwargs: Any) -> Any:
    if not (mlp.training and torch.is_grad_enabled() and (always or LayerLevels.recomputes_activation())):
        return forward(*args, **kwargs)
    return recomputed(forward, *args, keeps_products=True, **kwargs)


_recomputes_activation: ContextVar[bool] = ContextVar("recomputes_activation", default=False)


# Activation offload: move the inputs of recomputed layers to host memory in forward, and back in backward.
#
# With recomputation a layer only saves its input [tokens, width], but a deep model has many layers. While a layer
# computes, its input is copied to pinned memory on a separate stream. In backward, while a layer computes, the input
# of the layer below is copied back on another stream. Both directions of the link overlap with kernels, and nothing
# waits as long as a layer takes longer than a copy (`fcp_cli.cost.model` prices the waits). The last layer's input
# also stays on the device, since backward needs it first.
#
#     forward    layer  0    1    2    3            backward   layer  3    2    1    0
#                out    0    1    2    3                       back   2    1    0
#
# Pinned memory is not returned to the system but reused by PyTorch's host allocator, which tracks when copies have
# finished and rounds sizes up to powers of two. On a CPU the same code makes copies, which saves nothing but tests
# it.

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
