"""`npu_fusion_attention` and its gradient as documented, in plain fp64: TND layout, statistics (tokens, heads, 8)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FakeNpu:
    """Stands for the torch_npu module.

    Args:
        head_major: whether a segment's statistics lie in memory as [heads, rows, 8] in spite of their shape, as some
            releases have it, or in the order that the shape says.
        stats_dtype: of the statistics; fp32 on an NPU.
    """

    def __init__(self, *, head_major: bool, stats_dtype: torch.dtype = torch.float32) -> None:
        self.head_major = head_major
        self.stats_dtype = stats_dtype
        self.calls: list[dict[str, Any]] = []

    def npu_fusion_attention(
        self, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **options: Any
    ) -> tuple[Any, ...]:
        outs, largest, totals = [], [], []
        for q, k, v, allowed in self._segments(query, key, value, head_num, input_layout, options):
            scores = (q @ k.transpose(1, 2) * options["scale"]).masked_fill(~allowed, float("-inf"))
            top = scores.amax(-1)
            weights = (scores - top.unsqueeze(-1)).exp()
            total = weights.sum(-1)
            outs.append((weights @ v / total.unsqueeze(-1)).transpose(0, 1).to(query.dtype))
            largest.append(top.to(self.stats_dtype))
            totals.append(total.to(self.stats_dtype))
        empty = torch.empty(0)
        return torch.cat(outs), self._stats(largest), self._stats(totals), empty, 0, 0, 0

    def npu_fusion_attention_grad(
        self, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **options: Any
    ) -> tuple[Any, ...]:
        lengths = _lengths(options["actual_seq_qlen"])
        tops, totals = (self._unstats(options[name], lengths) for name in ("softmax_max", "softmax_sum"))
        pieces = self._segments(query, key, value, head_num, input_layout, options)
        row_pieces = zip(
            tops,
            totals,
            torch.split_with_sizes(dy.double(), lengths),
            torch.split_with_sizes(options["attention_in"].double(), lengths),
            strict=True,
        )
        dqs, dks, dvs = [], [], []
        for (q, k, v, allowed), (top, total, grad, out) in zip(pieces, row_pieces, strict=True):
            grad, out = grad.transpose(0, 1), out.transpose(0, 1)
            scores = (q @ k.transpose(1, 2) * options["scale_value"]).masked_fill(~allowed, float("-inf"))
            weights = (scores - top.double().unsqueeze(-1)).exp() / total.double().unsqueeze(-1)
            shared = weights * (grad @ v.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)) * options["scale_value"]
            dqs.append((shared @ k).transpose(0, 1))
            dks.append(_shared_heads(shared.transpose(1, 2) @ q, key.shape[1]))
            dvs.append(_shared_heads(weights.transpose(1, 2) @ grad, key.shape[1]))
        dq, dk, dv = (torch.cat(grads).to(query.dtype) for grads in (dqs, dks, dvs))
        return dq, dk, dv, torch.empty(0)

    def _segments(
        self, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, options: dict[str, Any]
    ) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """[heads, length, head_dim] of each segment in fp64, and which pairs are allowed."""
        self.calls.append(options)
        assert input_layout == "TND"
        assert head_num == query.shape[1]
        assert query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
        q_lengths, k_lengths = _lengths(options["actual_seq_qlen"]), _lengths(options["actual_seq_kvlen"])
        assert (sum(q_lengths), sum(k_lengths)) == (len(query), len(key))
        repeats = query.shape[1] // key.shape[1]
        queries = [part.double().transpose(0, 1) for part in torch.split_with_sizes(query, q_lengths)]
        keys = [
            part.double().transpose(0, 1).repeat_interleave(repeats, 0)
            for part in torch.split_with_sizes(key, k_lengths)
        ]
        values = [
            part.double().transpose(0, 1).repeat_interleave(repeats, 0)
            for part in torch.split_with_sizes(value, k_lengths)
        ]
        allowed = [_allowed(q, k, options) for q, k in zip(q_lengths, k_lengths, strict=True)]
        return list(zip(queries, keys, values, allowed, strict=True))

    def _stats(self, rows: list[Tensor]) -> Tensor:
        """One [heads, rows] per segment -> (tokens, heads, 8)."""
        if self.head_major:
            flat = torch.cat([part.reshape(-1) for part in rows])
            shape = (flat.numel() // len(rows[0]), len(rows[0]), 8)
            return flat.unsqueeze(-1).expand(-1, 8).reshape(shape).contiguous()
        return torch.cat([part.t() for part in rows]).unsqueeze(-1).expand(-1, -1, 8).contiguous()

    def _unstats(self, stats: Tensor, lengths: list[int]) -> list[Tensor]:
        assert stats.is_contiguous()
        assert stats.shape[-1] == 8
        assert bool((stats == stats[..., :1]).all()), "all 8 lanes hold the same value"
        heads = stats.shape[1]
        if self.head_major:
            parts = torch.split_with_sizes(stats[..., 0].reshape(-1), [length * heads for length in lengths])
            return [part.view(heads, -1) for part in parts]
        return [part.t() for part in torch.split_with_sizes(stats[..., 0], lengths)]


def _lengths(cumulative: list[int]) -> list[int]:
    assert isinstance(cumulative, list)
    return [stop - start for start, stop in zip([0, *cumulative], cumulative, strict=False)]


def _allowed(rows: int, keys: int, options: dict[str, Any]) -> Tensor:
    """sparse_mode 0: everything, as no mask is given; 3: causal, and 4: a band, aligned at the bottom right."""
    allowed = torch.ones(rows, keys, dtype=torch.bool, device="cpu")
    if options["sparse_mode"] in (3, 4):
        mask = options["atten_mask"]
        assert mask.shape == (2048, 2048) and mask.dtype == torch.bool and bool(mask[0, 1]) and not bool(mask[1, 0])
        if options["sparse_mode"] == 3:
            return allowed.tril(keys - rows)
        return allowed.tril(keys - rows + options["next_tockens"]).triu(keys - rows - options["pre_tockens"])
    assert options["sparse_mode"] == 0
    assert options["atten_mask"] is None
    return allowed


def _shared_heads(grad: Tensor, kv_heads: int) -> Tensor:
    heads, keys, head_dim = grad.shape
    return grad.view(kv_heads, heads // kv_heads, keys, head_dim).sum(1).transpose(0, 1)
