"""Interface between attention kernels and the ring.

Shapes: T tokens, H query heads, G key/value heads, head size D; Tq and Tk if queries and keys differ in number, Dv if
    heads of v may have another size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fcp_cli.runtime.layouts.layout import Segments


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
