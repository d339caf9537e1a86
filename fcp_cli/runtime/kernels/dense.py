"""Attention as plain matrix products, for data types that no fused kernel of a device supports."""

from __future__ import annotations

import torch
from torch import Tensor

from fcp_cli.runtime.kernels.base import lse_dtype
from fcp_cli.runtime.layout import Segments


class DenseKernel:
    """Attention for any device and floating type, one sequence at a time.

    Memory grows with the square of the longest sequence. Meant for verification (fp32 and fp64 on accelerators), and
    for soft caps, which no fused kernel of PyTorch supports. Train other models in bf16, with fused kernels.

    Args:
        softcap: maps scores s to softcap * tanh(s / softcap); None disables it.
    """

    packed = False

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        results = []
        for q_i, k_i, v_i in zip(
            torch.split_with_sizes(q, segments.q_lengths),
            torch.split_with_sizes(k, segments.k_lengths),
            torch.split_with_sizes(v, segments.k_lengths),
            strict=True,
        ):
            scores, _ = self._scores(q_i, k_i, segments, scale)
            lse = scores.logsumexp(-1)
            out = (scores - lse.unsqueeze(-1)).exp_() @ _expand(v_i, q_i).to(scores.dtype)
            results.append((out.transpose(0, 1).to(q.dtype), lse.transpose(0, 1)))
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = segments.q_lengths, segments.k_lengths
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        results = [
            self._segment_backward(*piece, segments=segments, scale=scale)
            for piece in zip(
                torch.split_with_sizes(dout, rows),
                torch.split_with_sizes(q, rows),
                torch.split_with_sizes(k, keys),
                torch.split_with_sizes(v, keys),
                torch.split_with_sizes(lse, rows),
                torch.split_with_sizes(delta, rows),
                strict=True,
            )
        ]
        dq, dk, dv = zip(*results, strict=True)
        return torch.cat(dq), torch.cat(dk), torch.cat(dv)

    def _segment_backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        *,
        segments: Segments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, slopes = self._scores(q, k, segments, scale)
        weights = (scores - lse.t().unsqueeze(-1)).exp_()  # [heads, rows, keys]
        grad = grad_out.transpose(0, 1).to(weights.dtype)
        dv = weights.transpose(1, 2) @ grad
        grad_weights = grad @ _expand(v, q).to(weights.dtype).transpose(1, 2)
        grad_scores = weights * (grad_weights - delta.t().unsqueeze(-1)) * scale
        if slopes is not None:
            grad_scores *= slopes
        dq = grad_scores @ _expand(k, q).to(weights.dtype)
        dk = grad_scores.transpose(1, 2) @ q.transpose(0, 1).to(weights.dtype)
        return dq.transpose(0, 1).to(q.dtype), _reduce(dk, k), _reduce(dv, v)

    def _scores(self, q: Tensor, k: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor | None]:
        """Return the scores [H, rows, keys] in the type of lse, and their derivative by uncapped scores, or None."""
        dtype, slopes = lse_dtype(q.dtype), None
        scores = (q.transpose(0, 1).to(dtype) @ _expand(k, q).transpose(1, 2).to(dtype)) * scale
        if self._softcap is not None:
            bent = torch.tanh(scores / self._softcap)
            scores, slopes = bent * self._softcap, 1 - bent.square()
        if segments.causal:
            ones = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            more = k.shape[0] - q.shape[0]  # number of keys before the first query's
            unseen = ones.triu(1 + more)
            if segments.window is not None:
                unseen |= ones.tril(more - segments.window)
            scores.masked_fill_(unseen, float("-inf"))
        return scores, slopes


def _expand(kv: Tensor, q: Tensor) -> Tensor:
    """Expand [keys, G, D] to [H, keys, D]: each key/value head serves consecutive query heads."""
    return kv.transpose(0, 1).repeat_interleave(q.shape[1] // kv.shape[1], dim=0)


def _reduce(grad: Tensor, like: Tensor) -> Tensor:
    """Sum [H, keys, D] over the query heads that share a key/value head, to [keys, G, D]."""
    keys, kv_heads, head_dim = like.shape
    return grad.view(kv_heads, -1, keys, head_dim).sum(1).transpose(0, 1).to(like.dtype)
