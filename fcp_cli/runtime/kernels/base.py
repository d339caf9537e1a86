"""What the ring asks of an attention kernel."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fcp_cli.runtime.layout import Segments


class AttentionKernel(Protocol):
    """Packed attention whose backward takes the log-sum-exp and output of the *whole* row, not of the keys at hand.

    That is what lets a ring split a row's keys over several calls: with the final `out` and `lse`, each call's share of
    dq, dk and dv is exact, and the shares add up.

    Attributes:
        packed: whether one call for all sequences is cheaper than a call for each, and worth gathering their rows.
    """

    packed: bool

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of every segment.

        Args:
            q: [sum(q_lengths), heads, head_dim]; the last dimension is contiguous, as in `k` and `v`.
            k, v: [sum(k_lengths), kv_heads, head_dim]; heads is a multiple of kv_heads.
            scale: factor on the scores.

        Returns:
            out, as `q`, and lse [sum(q_lengths), heads] in `lse_dtype(q.dtype)`.
        """
        ...

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv), shaped as q, k, v, given each row's final `out` and `lse`."""
        ...


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Precision in which results are kept and merged: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a small index tensor to `device` without making the host wait for the device's queue."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
