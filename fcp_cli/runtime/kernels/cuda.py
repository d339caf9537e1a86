"""Attention on CUDA by variable-length flash kernels: PyTorch's own, or others with the same signature.

`torch.nn.attention.varlen` wraps the same two operators, but its private custom operators only exist from torch 2.10
and have changed their signature since. The operators underneath are the same from torch 2.7, take a row's final out and
lse in backward, and are replaced by `torch.nn.attention.activate_flash_attention_impl`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fcp_cli.cost.recipe import KernelName
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.base import to_device, with_equal_sizes, with_equal_sizes_backward
from fcp_cli.runtime.layout import Segments


class FlashOperators(NamedTuple):
    """Pair of operators with the signatures of `aten::_flash_attention_forward` and its backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


ATEN: Final = FlashOperators(
    forward=torch.ops.aten._flash_attention_forward.default, backward=torch.ops.aten._flash_attention_backward.default
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Cumulative lengths on the device ([segments + 1] int32), longest segments on the host."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int


class CudaFlashKernel:
    """Attention in bf16 and fp16, with head sizes that are multiples of 8 up to 256 (FlashAttention 4: fewer sizes).

    It never synchronizes with the device.

    Args:
        name: name of the kernel.
        operators: operators to run; PyTorch's by default.
    """

    packed = True

    def __init__(self, name: KernelName = "fa2", operators: FlashOperators = ATEN) -> None:
        self.name = name
        self._operators = operators

    def refusal(self, segments: Segments) -> str | None:
        """Return the reason why the kernel cannot run a call; None, since it takes any lengths."""
        return None

    @with_equal_sizes
    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        check_head_dim(q)
        bounds = bounds_of(segments, q.device)
        out, lse, *_ = self._operators.forward(
            q,
            k,
            v,
            bounds.q,
            bounds.k,
            bounds.longest_q,
            bounds.longest_k,
            0.0,
            segments.causal,
            False,
            scale=scale,
            **_window(segments),
        )
        return out, tokens_first(lse, q)

    @with_equal_sizes_backward
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        bounds = bounds_of(segments, q.device)
        # Required arguments, but never read: without dropout there is no random state.
        random_state = segments.derived(
            ("random_state", q.device), lambda: torch.zeros(2, dtype=torch.uint64, device=q.device)
        )
        unused = segments.derived(("unused", q.device), lambda: torch.empty(0, device=q.device))
        dq, dk, dv = self._operators.backward(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            lse.t().contiguous(),
            bounds.q,
            bounds.k,
            bounds.longest_q,
            bounds.longest_k,
            0.0,
            segments.causal,
            random_state,
            unused,
            scale=scale,
            **_window(segments),
        )
        return dq, dk, dv


def _window(segments: Segments) -> dict[str, int]:
    """Return the keys a query sees on either side of its own; the kernel aligns the last query and key."""
    return {} if segments.window is None else {"window_size_left": segments.window - 1, "window_size_right": 0}


def check_head_dim(q: Tensor) -> None:
    """Raise RunError for a head size that the flash kernel does not support."""
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > 256:
        raise RunError(f"head_dim {head_dim} does not fit the CUDA flash kernel: it takes multiples of 8 up to 256")


def tokens_first(lse: Tensor, q: Tensor) -> Tensor:
    """Transpose the kernel's lse [H, T] to [T, H].

    Raises:
        RunError: another shape, which would give wrong gradients later (before 2.7 torch padded it per sequence).
    """
    tokens, heads = q.shape[:2]
    if lse.shape != (heads, tokens):
        raise RunError(
            f"the flash kernel of torch {torch.__version__} gives log-sum-exp of shape {tuple(lse.shape)}, "
            f"expected {(heads, tokens)}: use torch >= 2.7"
        )
    return lse.t()


def bounds_of(segments: Segments, device: torch.device) -> Bounds:
    return segments.derived(("bounds", device), lambda: _make_bounds(segments, device))


def _make_bounds(segments: Segments, device: torch.device) -> Bounds:
    return Bounds(
        q=_cumulative(segments.q_lengths, device),
        k=_cumulative(segments.k_lengths, device),
        longest_q=max(segments.q_lengths),
        longest_k=max(segments.k_lengths),
    )


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
    return to_device(bounds, device)
