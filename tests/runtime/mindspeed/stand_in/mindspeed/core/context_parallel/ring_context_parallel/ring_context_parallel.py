"""Causal attention of packed sequences over the members of a ring, of which each has an early and a late chunk."""

from typing import Any

import torch
from torch import Tensor

from mindspeed.core.context_parallel.utils import RingP2P


def ringattn_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n: int,
    cp_para: dict[str, Any],
    softmax_scale: float,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    packed_seq_params: Any = None,
) -> Tensor:
    """q [tokens, n, head_dim], k and v [tokens, kv_heads, head_dim] -> as q."""
    assert n == q.shape[1] and dropout_p == 0.0
    assert cp_para["cp_inner_ranks"] == [cp_para["cp_global_ranks"][cp_para["rank"]]]
    assert len(cp_para["cp_outer_ranks"]) == cp_para["cp_size"]
    _check_halves(packed_seq_params)
    out: Tensor = AttentionWithCp.apply(q, k, v, cp_para, softmax_scale, packed_seq_params)  # type: ignore[no-untyped-call]
    return out


def _check_halves(packed: Any) -> None:
    """Every sequence's first half is of `kv_index`, its second of `q_index`."""
    start = 0
    fronts: list[int] = []
    backs: list[int] = []
    for end in packed.cu_seqlens_q.tolist():
        assert (end - start) % 2 == 0
        fronts += range(start, (start + end) // 2)
        backs += range((start + end) // 2, end)
        start = end
    assert (packed.kv_index.tolist(), packed.q_index.tolist()) == (fronts, backs)


class AttentionWithCp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cp_para: dict[str, Any], scale: float, packed: Any
    ) -> Tensor:
        ring = RingP2P(cp_para["cp_outer_ranks"], cp_para["cp_group"])
        shards = ring.exchange([torch.stack((k, v))] * cp_para["cp_size"])
        ctx.cp_para, ctx.scale, ctx.ends = cp_para, scale, packed.cu_seqlens_q.tolist()
        ctx.save_for_backward(q, *shards)
        return _attend(q, shards, ctx.ends, cp_para["rank"], scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, *shards = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            out = _attend(q, shards, ctx.ends, ctx.cp_para["rank"], ctx.scale)
        dq, *shares = torch.autograd.grad(out, (q, *shards), grads[0])
        ring = RingP2P(ctx.cp_para["cp_dkv_outer_ranks"], ctx.cp_para["cp_group"])
        dk, dv = torch.stack(ring.exchange(list(shares))).sum(0)
        return dq, dk, dv, None, None, None


def _attend(q: Tensor, shards: list[Tensor], ends: list[int], rank: int, scale: float) -> Tensor:
    outs = []
    for start, end in zip([0, *ends], ends, strict=False):
        half = (end - start) // 2
        seen = torch.cat([_positions(half, member, len(shards)) for member in range(len(shards))])
        keys, values = torch.cat([shard[:, start:end] for shard in shards], dim=1).repeat_interleave(
            q.shape[1] // shards[0].shape[2], dim=2
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * scale
        future = seen > _positions(half, rank, len(shards)).unsqueeze(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outs)


def _positions(half: int, member: int, members: int) -> Tensor:
    early = torch.arange(half) + member * half
    return torch.cat((early, torch.arange(half) + (2 * members - 1 - member) * half))
