"""Interface between attention kernels and the ring.

Shapes: T tokens, H query heads, G key/value heads, head size D; Tq and Tk if queries and keys differ in number, Dv if
    heads of v may have another size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.runtime.layout import Segments


class AttentionKernel(Protocol):
    """Packed attention whose backward takes the log-sum-exp and output of the *whole* row, not of its keys only.

    This lets a ring split a row's keys over several calls: with the final `out` and `lse`, each call's shares of dq, dk
    and dv are exact and only need to be added.

    Attributes:
        packed: whether one call for all sequences is cheaper than one per sequence, even if rows must be gathered for
            it.
    """

    packed: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """Attend within every segment.

        Args:
            q: [Tq, H, D], Tq = sum(q_lengths); the last dimension is contiguous, as in `k` and `v`.
            k, v: [Tk, G, D] and [Tk, G, Dv], Tk = sum(k_lengths); H is a multiple of G.
            segments: sequences of the call.
            scale: factor on the scores.

        Returns:
            out [Tq, H, Dv] in the type of `q`, and lse [Tq, H] in `lse_dtype(q.dtype)`.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) in the shapes of q, k and v, given each row's final `out` and `lse`."""
        ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the data type in which results are kept and merged: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small index tensor to `device` without blocking the host."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


# Zero-padding of heads for kernels that require equal head sizes of q, k and v.
#
# Zeros appended to queries and keys do not change the scores. Zeros appended to values add output columns, which are
# cut.

Method = TypeVar("Method", bound=Callable[..., Any])


def with_equal_sizes(forward: Method) -> Method:
    """Wrap `AttentionKernel.forward` of a kernel that requires equal head sizes: pad with zeros, and cut the result."""

    @wraps(forward)
    def widened(kernel: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        size = v.shape[2]
        if size == q.shape[2]:
            return forward(kernel, q, k, v, *rest, **named)
        out, lse = forward(kernel, *_widened(q, k, v), *rest, **named)
        return out[..., :size].contiguous(), lse

    return cast(Method, widened)


def with_equal_sizes_backward(backward: Method) -> Method:
    """Wrap `AttentionKernel.backward` of a kernel that requires equal head sizes."""

    @wraps(backward)
    def widened(
        kernel: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, **named: Any
    ) -> Any:
        sizes = q.shape[2], k.shape[2], v.shape[2]
        if v.shape[2] == q.shape[2]:
            return backward(kernel, dout, q, k, v, out, *rest, **named)
        grads = backward(kernel, *_widened(dout, q, k, v, out), *rest, **named)
        own = (grad[..., :size].contiguous() for grad, size in zip(grads, sizes, strict=False))
        return *own, *grads[len(sizes) :]

    return cast(Method, widened)


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad heads [.., .., D] with zeros to the largest size among them."""
    size = max(tensor.shape[2] for tensor in tensors)
    return tuple(functional.pad(tensor, (0, size - tensor.shape[2])) for tensor in tensors)
