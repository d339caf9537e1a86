"""Ring attention of a call, MindSpeed's or fcp's own, between Ulysses all-to-alls.

MindSpeed's ring attention takes its members as an argument, as global ranks, and keeps them for the backward. So one
process group carries all rings. MindSpeed's own Ulysses and hybrid layers are bypassed, since they are bound to static
groups; the all-to-alls are fcp's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from fcp_cli.runtime.communication.shared_heads import Swapped
from fcp_cli.runtime.layouts.layout import CACHED_LAYOUTS
from fcp_cli.runtime.ring_attention.attention import attention
from fcp_cli.runtime.ring_attention.ring import Ring

_MASK_TOKENS = 2048  # size of the causal mask that fused attention on NPUs requires for all lengths
_NO_BIAS = 1  # a `pse_type`: no positional bias


def attend_on_mindspeed(
    ring: Ring, query: Tensor, key: Tensor, value: Tensor, *, scale: float, group: dist.ProcessGroup, settings: Any
) -> Tensor:
    """Compute attention over a pack sharded on a ring, with MindSpeed's ring attention.

    Args:
        ring: ring of the call, with chunks of equal length.
        query, key, value: [tokens, heads, head_dim] of the shard.
        scale: factor on the scores.
        group: process group of all ranks.
        settings: other arguments of MindSpeed's ring attention, from `ring_settings`.

    Returns:
        [tokens, heads, head_dim].
    """
    ring.attention_calls += 1
    if ring.heads_degree == 1:
        return _around_ring(ring, query, key, value, scale, group, settings)
    ring.check_shapes(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)))
    exchange = ring.head_exchange()
    query, key, value = Swapped.apply(exchange, None, query, key, value)  # type: ignore[no-untyped-call]
    out = _around_ring(ring.ring_of_head_group(), query, key, value, scale, group, settings)
    (own,) = Swapped.apply(exchange, (out.shape[1] * ring.heads_degree,), out)  # type: ignore[no-untyped-call]
    back: Tensor = own
    return back


def attend_on_own(ring: Ring, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute the same as `attend_on_mindspeed` with fcp's own ring, whose chunks may have any length."""
    out = attention(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)), ring=ring, scale=scale)
    return out.squeeze(0).transpose(0, 1)


def ring_settings(config: Any, layer_number: int) -> dict[str, Any]:
    """Return the arguments of MindSpeed's ring attention that are equal in all calls of a layer."""
    from mindspeed.core.context_parallel.ring_context_parallel.context_parallel_kv_cache import get_cache_policy

    policy = getattr(config, "context_parallel_kv_cache_policy", None)
    return {
        "causal": True,
        "megatron_cp_in_bnsd": getattr(config, "megatron_cp_in_bnsd", False),
        "cache_policy": get_cache_policy(layer_number, policy, getattr(config, "context_parallel_cache_interval", 0)),
        "pse": None,
        "pse_type": _NO_BIAS,
        "cp_group_for_send_recv_overlap": None,
        "cp_group_for_intra_window_send_recv_overlap": None,
    }


def _around_ring(
    member: Ring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    group: dist.ProcessGroup,
    settings: Any,
) -> Tensor:
    from mindspeed.core.context_parallel.ring_context_parallel.ring_context_parallel import ringattn_context_parallel

    ranks, at = list(member.ranks), member.index
    lengths = tuple(member.ring_layout.owned(at).tolist()) or (query.shape[0],)  # () if idle
    members = {
        "cp_group": group,
        "cp_size": len(ranks),
        "rank": at,
        "cp_global_ranks": ranks,
        "cp_inner_ranks": [ranks[at]],  # no double ring: windows (`--cp-window-size`) of one rank
        "cp_outer_ranks": ranks,
        "cp_dkv_outer_ranks": ranks,
        "cp_group_for_intra_window": group,
    }
    packed, mask = _local_sequences(lengths, query.device), _causal_mask(query.device)
    shards = (tensor.contiguous() for tensor in (query, key, value))
    heads = query.shape[1]
    out: Tensor = ringattn_context_parallel(*shards, heads, {**settings, **members}, scale, mask, 0.0, packed)
    return out


@lru_cache(maxsize=CACHED_LAYOUTS)
def _local_sequences(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """Return a shard in MindSpeed's format: sequence ends, and the indices of front and back chunks."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    is_front = torch.arange(int(ends[-1])) < (ends - sizes // 2).repeat_interleave(sizes)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    packed.kv_index = is_front.nonzero().flatten().to(device)
    packed.q_index = (~is_front).nonzero().flatten().to(device)
    return packed


@lru_cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_TOKENS, _MASK_TOKENS, dtype=torch.bool, device=device).triu(1)
