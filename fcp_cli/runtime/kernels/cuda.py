"""Attention on CUDA: the variable-length flash kernel that ships with PyTorch.

`torch.nn.attention.varlen` wraps the same two operators, but its private custom operators exist only from torch 2.10
and have changed their arguments since; the operators underneath are the same from torch 2.7 on, take a row's final
out and lse in backward, and are what `torch.nn.attention.activate_flash_attention_impl("FA3")` replaces.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
import torch.nn.attention
from torch import Tensor

from fcp_cli.console import note
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.kernels.equal_sizes import with_equal_sizes, with_equal_sizes_backward
from fcp_cli.runtime.layout import Segments

_forward = torch.ops.aten._flash_attention_forward.default
_backward = torch.ops.aten._flash_attention_backward.default


_VARIABLE = "FCP_FLASH_ATTENTION"
_FA3_MODULE = "flash_attn_interface"  # what the package flash-attn-3 is imported as
_HOPPER = 9  # major compute capability


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Cumulative lengths on the device ([segments + 1] int32), longest segments on the host."""

    q: Tensor
    k: Tensor
    longest_q: int
    longest_k: int


@lru_cache(maxsize=1)
def activate_flash_attention_3() -> bool:
    """Let the flash operators of this process run FlashAttention 3 where it is installed and the device is a Hopper.

    It is what `torch.nn.attention` offers, and it holds for all flash attention of the process. FCP_FLASH_ATTENTION=FA2
    forbids it; an implementation that the script has chosen stays.

    Returns:
        Whether it was activated here.
    """
    attention = torch.nn.attention
    wanted = os.environ.get(_VARIABLE, "FA3") == "FA3"
    if not wanted or not hasattr(attention, "activate_flash_attention_impl") or find_spec(_FA3_MODULE) is None:
        return False
    if attention.current_flash_attention_impl() is not None or torch.cuda.get_device_capability()[0] != _HOPPER:
        return False
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        note(f"{_FA3_MODULE} is installed but cannot be used, attention stays with FlashAttention 2: {error}")
        return False
    return True


class CudaFlashKernel:
    """bf16 and fp16, head_dim a multiple of 8 up to 256. No device synchronisation."""

    packed = True

    @with_equal_sizes
    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        check_head_dim(q)
        bounds = _bounds(segments, q.device)
        out, lse, *_ = _forward(
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
        bounds = _bounds(segments, q.device)
        # No dropout, so the random state is never read; it only has to exist.
        random_state = segments.derived(
            ("random_state", q.device), lambda: torch.zeros(2, dtype=torch.uint64, device=q.device)
        )
        unused = segments.derived(("unused", q.device), lambda: torch.empty(0, device=q.device))
        dq, dk, dv = _backward(
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
    """Return how many keys before and after its own a query sees, which the kernel aligns at the last of both."""
    return {} if segments.window is None else {"window_size_left": segments.window - 1, "window_size_right": 0}


def check_head_dim(q: Tensor) -> None:
    """Raise RunError for a head_dim that the flash kernel does not take."""
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > 256:
        raise RunError(f"head_dim {head_dim} does not fit the CUDA flash kernel: it takes multiples of 8 up to 256")


def tokens_first(lse: Tensor, q: Tensor) -> Tensor:
    """Turn [H, T], as the kernel gives it, into [T, H].

    Raises: RunError for another shape (releases before 2.7 padded it per sequence), rather than wrong gradients later.
    """
    tokens, heads = q.shape[:2]
    if lse.shape != (heads, tokens):
        raise RunError(
            f"the flash kernel of torch {torch.__version__} gives log-sum-exp of shape {tuple(lse.shape)}, "
            f"expected {(heads, tokens)}: use torch >= 2.7"
        )
    return lse.t()


def _bounds(segments: Segments, device: torch.device) -> _Bounds:
    return segments.derived(("bounds", device), lambda: _make_bounds(segments, device))


def _make_bounds(segments: Segments, device: torch.device) -> _Bounds:
    return _Bounds(
        q=_cumulative(segments.q_lengths, device),
        k=_cumulative(segments.k_lengths, device),
        longest_q=max(segments.q_lengths),
        longest_k=max(segments.k_lengths),
    )


def _cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths), 0, dtype=torch.int32, out=bounds[1:])
    return to_device(bounds, device)
