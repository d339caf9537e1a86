"""Attention on CPUs: PyTorch's flash kernel, one call per sequence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fcp_cli.runtime.kernels.base import lse_dtype, with_equal_sizes, with_equal_sizes_backward
from fcp_cli.runtime.layout import Segments

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Before 2.9 the kernel assumed as many key heads as query heads, and read out of bounds if there were fewer.
_SHARES_KV_HEADS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 9)


# Bounds on the number of queries per call with sliding windows; within them it equals the window.
_LEAST_BLOCK, _MOST_BLOCK = 128, 1024


class CpuKernel:
    """Attention in fp64, fp32, bf16 and fp16. An empty q or k would kill the process (SIGFPE); `Segments` has none."""

    packed = False

    @with_equal_sizes
    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        assert all(segments.q_lengths), "an empty query segment"
        assert all(segments.k_lengths), "an empty key segment"
        k, v = _with_heads(k, q.shape[1]), _with_heads(v, q.shape[1])
        pieces = zip(
            _split(q, segments.q_lengths), _split(k, segments.k_lengths), _split(v, segments.k_lengths), strict=True
        )
        if segments.window is not None:
            results = [_windowed_forward(*piece, segments.window, scale) for piece in pieces]
        else:
            results = [_forward(*piece, 0.0, segments.causal, scale=scale) for piece in pieces]
        return _join([out for out, _ in results]), _join([lse for _, lse in results])

    @with_equal_sizes_backward
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys, kv_heads = segments.q_lengths, segments.k_lengths, k.shape[1]
        k, v = _with_heads(k, q.shape[1]), _with_heads(v, q.shape[1])
        pieces = zip(
            _split(dout, rows),
            _split(q, rows),
            _split(k, keys),
            _split(v, keys),
            _split(out, rows),
            _split(lse, rows),
            strict=True,
        )
        if segments.window is not None:
            results = [_windowed_backward(*piece, window=segments.window, scale=scale) for piece in pieces]
        else:
            results = [_backward(*piece, 0.0, segments.causal, scale=scale) for piece in pieces]
        dq, dk, dv = zip(*results, strict=True)
        return _join(dq), _sum_heads(_join(dk), kv_heads), _sum_heads(_join(dv), kv_heads)


def _windowed_forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in blocks of queries, each to the keys that any of its queries sees: [1, H, n, D] and [1, G, m, D]."""
    results = [
        _forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, attn_mask=mask, scale=scale)
        for rows, keys, mask in _blocks(q, k, window)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _windowed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dqs, dtype = [], lse_dtype(q.dtype)
    dk, dv = (torch.zeros_like(tensor, dtype=dtype) for tensor in (k, v))
    for rows, keys, mask in _blocks(q, k, window):
        of_rows = [tensor[:, :, rows] for tensor in (dout, q, out, lse)]
        grads = _backward(
            of_rows[0], of_rows[1], k[:, :, keys], v[:, :, keys], *of_rows[2:], 0.0, False, attn_mask=mask, scale=scale
        )
        dqs.append(grads[0])
        dk[:, :, keys] += grads[1]
        dv[:, :, keys] += grads[2]
    return torch.cat(dqs, dim=2), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield blocks of queries, the keys that any of them sees, and their mask; last query and last key are aligned."""
    queries, more = q.shape[2], k.shape[2] - q.shape[2]
    size = min(max(window, _LEAST_BLOCK), _MOST_BLOCK)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        first = max(0, start + more - window + 1)
        yield slice(start, stop), slice(first, stop + more), _band(stop - start, stop + more - first, window, q.dtype)


@lru_cache(maxsize=32)
def _band(rows: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [rows, keys]: 0 within a query's window, -inf elsewhere."""
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cpu").tril_(keys - rows).triu_(keys - rows - window + 1)
    return torch.zeros(rows, keys, dtype=dtype, device="cpu").masked_fill_(~seen, float("-inf"))


def _split(packed: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Split [T, H, ...] into one view [1, H, length, ...] per segment."""
    batched = packed.transpose(0, 1).unsqueeze(0)
    return (batched,) if len(lengths) == 1 else torch.split_with_sizes(batched, lengths, dim=2)


def _join(pieces: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Concatenate one [1, H, length, ...] per segment to [T, H, ...], the kernel's own memory order."""
    unbatched = [piece[0].transpose(0, 1) for piece in pieces]
    return unbatched[0] if len(unbatched) == 1 else torch.cat(unbatched)


def _with_heads(kv: Tensor, heads: int) -> Tensor:
    """Repeat the heads of [T, G, D] to as many as the kernel needs; each serves consecutive query heads."""
    if _SHARES_KV_HEADS or kv.shape[1] == heads:
        return kv
    return kv.repeat_interleave(heads // kv.shape[1], dim=1)


def _sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """Return the gradient through `_with_heads`."""
    if grad.shape[1] == kv_heads:
        return grad
    return grad.reshape(grad.shape[0], kv_heads, -1, grad.shape[2]).sum(2)
