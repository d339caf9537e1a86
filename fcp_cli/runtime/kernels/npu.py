"""Attention on Ascend NPUs: `torch_npu.npu_fusion_attention` and its gradient, in the packed layout TND.

The operator returns the maximum and the sum of each row's exponentials instead of their log-sum-exp, so lse = max +
log(sum). A backward given (max, sum) := (lse, 1) computes the same weights: exp(score - max) / sum = exp(score - lse).
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.base import to_device, with_equal_sizes, with_equal_sizes_backward
from fcp_cli.runtime.layout import Segments

_STATS_LANES = 8  # the operator repeats each row's statistics 8 times
_MASK_SIDE = 2048  # side of the compressed causal mask, for all lengths
_MOST_BLOCKS = 64  # each block costs the host microseconds for a view and a copy
_NO_MASK, _CAUSAL_BOTTOM_RIGHT, _BAND = 0, 3, 4  # sparse_mode


class NpuKernel:
    """Attention in bf16 and fp16.

    It only synchronizes with the device at the first call, which probes the memory order of the row statistics.

    Args:
        operators: module with `npu_fusion_attention` and `npu_fusion_attention_grad`; torch_npu by default.
    """

    packed = True

    def __init__(self, operators: Any = None) -> None:
        self._operators = importlib.import_module("torch_npu") if operators is None else operators
        self._head_major: bool | None = None

    @with_equal_sizes
    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        out, largest, total = self._fusion_attention(q, k, v, segments, scale)
        lse = largest[..., 0] + total[..., 0].log()
        return out, tokens_first(lse, segments.q_lengths) if self._stats_are_head_major(q) else lse

    @with_equal_sizes_backward
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = heads_first(lse, segments.q_lengths) if self._stats_are_head_major(q) else lse
        largest = stats.unsqueeze(-1).expand(*stats.shape, _STATS_LANES).contiguous()
        dq, dk, dv, *_ = self._operators.npu_fusion_attention_grad(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            dout.contiguous(),
            q.shape[1],
            "TND",
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=out.contiguous(),
            scale_value=scale,
            **_mask_and_lengths(segments, q.device),
        )
        return dq, dk, dv

    def _fusion_attention(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output [T, H, D] and the row maxima and sums [T, H, 8]."""
        out, largest, total, *_ = self._operators.npu_fusion_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            q.shape[1],
            "TND",
            scale=scale,
            **_mask_and_lengths(segments, q.device),
        )
        expected = (*q.shape[:2], _STATS_LANES)
        if largest.shape != expected or total.shape != expected:
            raise RunError(
                f"npu_fusion_attention gives row statistics of shape {tuple(largest.shape)}, expected {expected}: "
                "use a torch_npu release whose TND layout has (tokens, heads, 8)"
            )
        return out, largest, total

    def _stats_are_head_major(self, like: Tensor) -> bool:
        """Return whether the statistics of a segment are stored as [H, rows, 8], despite their shape.

        Releases differ, and a wrong guess would silently give wrong gradients, so the operator is probed once with
        scores that encode their row and head.
        """
        if self._head_major is None:
            self._head_major = self._probe(like)
        return self._head_major

    def _probe(self, like: Tensor) -> bool:
        heads, lengths = 2, (2, 3)
        tokens = sum(lengths)
        names = torch.arange(tokens * heads, dtype=torch.float32, device="cpu").view(tokens, heads)
        q = torch.zeros(tokens, heads, like.shape[-1], dtype=like.dtype, device=like.device)
        q[..., 0] = names.to(q)
        k = torch.zeros_like(q)
        k[..., 0] = 1.0
        _, largest, _ = self._fusion_attention(q, k, k, Segments(lengths, lengths, causal=False), 1.0)
        answer = largest[..., 0].float().cpu()
        if torch.equal(answer, names):
            return False
        if torch.equal(
            torch.cat([part.reshape(heads, -1).t() for part in torch.split_with_sizes(answer, lengths)]), names
        ):
            return True
        raise RunError(
            "npu_fusion_attention orders its row statistics in a way this version of fcp does not know: "
            "use the torch_npu release that matches your torch"
        )


def tokens_first(stats: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Convert statistics [T, H] that are stored as [H, rows] per segment to the layout of their shape.

    Segments are copied as blocks with contiguous rows. If there are too many blocks for the host, a single gather
    copies all elements.
    """
    heads = stats.shape[1]
    if len(set(lengths)) <= 1:  # a single copy of all segments
        return stats.reshape(-1, heads, lengths[0]).transpose(1, 2).reshape(stats.shape)
    if len(lengths) > _MOST_BLOCKS:
        return stats.reshape(-1).index_select(0, _element_order(lengths, heads, stats.device)[0]).view(stats.shape)
    return torch.cat([part.reshape(heads, -1).t() for part in torch.split_with_sizes(stats, lengths)])


def heads_first(stats: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Reverse `tokens_first`."""
    heads = stats.shape[1]
    if len(set(lengths)) <= 1:
        return stats.reshape(-1, lengths[0], heads).transpose(1, 2).reshape(stats.shape)
    if len(lengths) > _MOST_BLOCKS:
        return stats.reshape(-1).index_select(0, _element_order(lengths, heads, stats.device)[1]).view(stats.shape)
    return torch.cat([part.t().reshape(-1) for part in torch.split_with_sizes(stats, lengths)]).view(stats.shape)


@lru_cache(maxsize=4)
def _element_order(lengths: tuple[int, ...], heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the position of each element and the element at each position, [T * H] int32.

    The cache only covers a micro-batch or two (orders of all rows of a member and of its backs): at 16k tokens and 32
    heads each order takes 4 MB.
    """
    sizes = [length * heads for length in lengths]
    memory = torch.split_with_sizes(torch.arange(sum(sizes), device="cpu"), sizes)
    order = torch.cat([part.view(heads, -1).t().reshape(-1) for part in memory])
    return to_device(order.int(), device), to_device(order.argsort().int(), device)


def _mask_and_lengths(segments: Segments, device: torch.device) -> dict[str, Any]:
    return segments.derived(("npu", device), lambda: _make_mask_and_lengths(segments, device))


def _make_mask_and_lengths(segments: Segments, device: torch.device) -> dict[str, Any]:
    """Return the operator's keyword arguments; lengths are cumulative host integers without the leading 0."""
    mode = (_BAND if segments.window else _CAUSAL_BOTTOM_RIGHT) if segments.causal else _NO_MASK
    # A band is aligned with a segment's last key, and uses the same compressed mask.
    band = {} if segments.window is None else {"pre_tockens": segments.window - 1, "next_tockens": 0}
    return {
        "atten_mask": _causal_mask(device) if segments.causal else None,
        "sparse_mode": mode,
        **band,
        "actual_seq_qlen": list(accumulate(segments.q_lengths)),
        "actual_seq_kvlen": list(accumulate(segments.k_lengths)),
    }


@lru_cache(maxsize=8)
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu_(1)
