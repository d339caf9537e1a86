"""Activation checkpointing: recompute a layer in backward, whole or all but its attention.

Backward needs a layer's activations. Recomputed, a layer keeps its inputs alone and runs forward once more in backward,
and with it its ring: the keys and values of the whole group travel again. `keep_attention` keeps the results of
attention, too, so that only work of the rank alone runs again:

    kept of a layer, T tokens, width W, H query heads and G key/value heads of size D
    full         its inputs                                                [T, W]
    selective    its inputs, and of attention q, k, v, out and lse         [T, W + 2 H D + 2 G D], lse [T, H]

`ring.attention` asks `attention_stage` where it runs; this module knows nothing of rings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fcp_cli.errors import RunError
from fcp_cli.runtime.recomputation.offload import offloaded_inputs


class AttentionStage(Protocol):
    """Treatment of the attention calls inside a layer under `keep_attention`."""

    def attend(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of one call; `compute` runs it."""
        ...


attention_stage: ContextVar[AttentionStage | None] = ContextVar("attention_stage", default=None)
"""How attention runs in the layer that is computed now, the first time or again; None where it just runs."""


class _Output(NamedTuple):
    """Output of one attention call of the first forward."""

    out: Tensor
    requires_grad: bool


def recomputed(layer: Callable[..., Any], *args: Any, keeps_attention: bool = False, **kwargs: Any) -> Any:
    """Run a layer under activation checkpointing.

    Inside `ActivationOffload.of`, the inputs wait for that in the host's memory.

    Args:
        layer: called with `args` and `kwargs`; its inputs that need gradients belong in `args`.
        keeps_attention: keep the results of attention (`keep_attention`).
    """
    contexts = keep_attention if keeps_attention else noop_context_fn
    with offloaded_inputs():  # the checkpoint's own hooks are inside: tensors that the layer saves never get here
        return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward and the recomputation of one layer that keeps its attention.

    To be given as `context_fn` to a non-reentrant checkpoint:

        checkpoint(layer, hidden, use_reentrant=False, context_fn=keep_attention)

    The first forward keeps the tensors that the backward of attention needs (q, k, v, its output and lse). When the
    layer is recomputed, attention returns the kept output: no kernel runs and nothing travels around the ring. A
    layer may attend several times, in the same order both times. Gradients are those without recomputation, bit for
    bit where the layer's other operations are deterministic.
    """
    outputs: list[_Output] = []
    return _Keeping(outputs), _HandingOut(outputs)


class _Stage(ABC):
    """The stage of the attention calls inside a `with` block, which may be entered again after it was left."""

    def __init__(self, outputs: list[_Output]) -> None:
        self._outputs = outputs
        self._tokens: list[Token[AttentionStage | None]] = []

    @abstractmethod
    def attend(self, compute: Callable[[], Tensor]) -> Tensor: ...

    def __enter__(self) -> None:
        self._tokens.append(attention_stage.set(self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        attention_stage.reset(self._tokens.pop())


class _Keeping(_Stage):
    def attend(self, compute: Callable[[], Tensor]) -> Tensor:
        # The hooks of the checkpoint would drop the tensors that attention saves; these, inside them, keep them.
        with saved_tensors_hooks(_keep, _unchanged):
            out = compute()
        self._outputs.append(_Output(out.detach(), out.requires_grad))
        return out


class _HandingOut(_Stage):
    def __init__(self, outputs: list[_Output]) -> None:
        super().__init__(outputs)
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
        # It must require a gradient as the first did: else later operations would save other tensors than then.
        return out.detach().requires_grad_(requires_grad)


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def _unchanged(kept: tuple[Tensor, int]) -> Tensor:
    """Return a kept tensor; PyTorch does not check those that went through hooks."""
    tensor, version = kept
    if tensor._version != version:
        raise RunError(
            "an input of attention was changed in place after the call, and its backward would use it changed; write "
            "the operation without '_', or recompute the layer whole, without keep_attention"
        )
    return tensor
