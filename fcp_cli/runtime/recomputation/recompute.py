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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fcp_cli.errors import RunError
from fcp_cli.runtime.recomputation.offload import offloaded_inputs

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
