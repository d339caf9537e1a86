"""The interface of an attention kernel to the ring.

T tokens, H query heads, G key/value heads, D head size; Tq and Tk where queries and keys differ in number, Dv where
heads of values may have another size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fcp_cli.runtime.layouts.layout import Segments


class AttentionKernel(Protocol):
    """Packed attention whose backward takes the log-sum-exp and output of the *whole* row, not of the keys it gets.

    So a ring can split a row's keys over several calls: with the final `out` and `lse`, each call's share of
    dq, dk and dv is exact, and the shares add up.

    Attributes:
        packed: whether one call for all sequences is cheaper than a call for each, and worth gathering their rows.
    """

    packed: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """Attend within every segment.

        Args:
            q: [Tq, H, D], Tq = sum(q_lengths); the last dimension is contiguous, as in `k` and `v`.
            k, v: [Tk, G, D] and [Tk, G, Dv], Tk = sum(k_lengths); H is a multiple of G.
            scale: factor on the scores.

        Returns:
            out [Tq, H, Dv] in the type of `q`, and lse [Tq, H] in `lse_dtype(q.dtype)`.
        """
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv), shaped as q, k, v, given each row's final `out` and `lse`."""
        ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which results are kept and merged: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small index tensor to `device` without making the host wait for the device's queue."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
