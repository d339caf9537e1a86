"""Attention of a GPTModel under MindSpeed: layers hooked to the ring of each call, and the process groups of a call.

The ring is an attribute of the call's PackedSeqParams, which every layer passes on and recomputation saves. Only the
core attention sees packed sequences, since with them megatron-core 0.12 would apply rotary embeddings for its static
group.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from torch import Tensor, nn

from fcp_cli.integrations.megatron.data import current_microbatch
from fcp_cli.integrations.megatron.model import PARAMS, RingSequences
from fcp_cli.runtime.exchange import Swapped
from fcp_cli.runtime.layout import CACHED_LAYOUTS
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention

_UNFLATTEN = "mindspeed.core.context_parallel.utils.unflatten_softmax"

_sequences: ContextVar[RingSequences | None] = ContextVar("sequences_of_the_layer", default=None)


def hook_layer(layer: Attention, on_ring: Callable[[Ring, Tensor, Tensor, Tensor], Tensor]) -> None:
    """Hook one attention layer to the ring of the call, without changing its modules.

    Args:
        on_ring: computes attention from the ring and a shard's queries, keys and values [tokens, heads, head_dim].
    """
    layer.forward = partial(_attention, layer.forward)
    layer._checkpointed_attention_forward = partial(_recomputable_core, layer._checkpointed_attention_forward)
    layer.core_attention.forward = partial(_core_attention, layer.core_attention.forward, on_ring)


def scale_of(core: nn.Module, config: Any) -> float:
    """Return the softmax scale of a core attention, possibly wrapped by MindSpeed's Ulysses."""
    local = getattr(core, "local_attn", core)
    made, asked = getattr(local, "softmax_scale", None), getattr(config, "softmax_scale", None)
    scale: float = config.kv_channels**-0.5 if asked is None else asked
    return scale if made is None else float(made)


def hook_rotary(rotary: nn.Module) -> None:
    """Hook a rotary embedding to return the table of all positions in planned micro-batches.

    Unhooked, it slices the table for the static context-parallel group, and caches the slice for the next call.
    """
    rotary.register_forward_pre_hook(
        lambda _, args, kwargs: None if current_microbatch.get() is None else (args, {**kwargs, "packed_seq": True}),
        with_kwargs=True,
    )


def _attention(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an attention layer as for a single sequence, and pass the ring to its core attention."""
    sequences = kwargs.get(PARAMS)
    if not isinstance(sequences, RingSequences):
        return original(*args, **kwargs)
    token = _sequences.set(sequences)
    try:
        return original(*args, **{**kwargs, PARAMS: None})
    finally:
        _sequences.reset(token)


def _recomputable_core(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pass the ring to a recomputed core attention as an argument, since it runs again after the layer's call."""
    return original(*args, **{**kwargs, PARAMS: _sequences.get() or kwargs.get(PARAMS)})


def _core_attention(
    original: Callable[..., Tensor],
    on_ring: Callable[[Ring, Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Implement Megatron's core attention; query [tokens, 1, heads, head_dim] -> [tokens, 1, heads * head_dim]."""
    given = kwargs.get(PARAMS)
    sequences = given if isinstance(given, RingSequences) else _sequences.get()
    if sequences is None or sequences.ring is None:
        return original(query, key, value, attention_mask, *args, **kwargs)
    out = on_ring(sequences.ring, query.squeeze(1), key.squeeze(1), value.squeeze(1))
    return out.reshape(query.shape[0], 1, -1)


def plain_attention(scale: float, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Compute causal attention over one whole sequence without a ring, in at least fp32; memory is quadratic.

    Has the signature of Megatron's core attention; query [tokens, 1, heads, head_dim] -> [tokens, 1, heads * head_dim].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (tensor.squeeze(1).transpose(0, 1).to(wide) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(len(q) // len(k), dim=0) for tensor in (k, v))
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(future, float("-inf"))
    out: Tensor = (scores.softmax(-1) @ v).to(query.dtype).transpose(0, 1)
    return out.reshape(query.shape[0], 1, -1)


def replace_unflatten() -> bool:
    """Replace MindSpeed's `unflatten_softmax` if it fails in this version; return whether it did.

    Without the fused update, it calls `view` on a transposed tensor, which is not contiguous with several heads.
    """
    from mindspeed.core.context_parallel import utils

    try:
        utils.unflatten_softmax(torch.zeros(2, 2, 8, device="cpu"), [2])
    except RuntimeError:
        wrap_everywhere(_UNFLATTEN, unflatten_softmax_wrapper)
        return True
    return False


def unflatten_softmax_wrapper(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Implement `unflatten_softmax` with `reshape`: [tokens, heads, 8] becomes head-major within each sequence."""

    def unflatten_softmax(x: Tensor, sub_seq_len: list[int]) -> Tensor:
        heads, lanes = x.shape[1:]
        rows = torch.split_with_sizes(x.reshape(-1, lanes), [length * heads for length in sub_seq_len])
        merged = torch.cat([part.reshape(-1, heads, lanes).transpose(0, 1).reshape(-1, lanes) for part in rows])
        return merged.view(x.shape)

    return unflatten_softmax


# Ring attention of a call, MindSpeed's or fcp's own, between Ulysses all-to-alls.
#
# MindSpeed's ring attention takes its members as an argument, as global ranks, and keeps them for the backward. So
# one process group carries all rings. MindSpeed's own Ulysses and hybrid layers are bypassed, since they are bound to
# static groups; the all-to-alls are fcp's.

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
    if ring.ulysses_degree == 1:
        return _around_ring(ring, query, key, value, scale, group, settings)
    ring.check_shapes(*(tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)))
    exchange = ring.head_exchange()
    query, key, value = Swapped.apply(exchange, None, query, key, value)  # type: ignore[no-untyped-call]
    out = _around_ring(ring.ring_of_head_group(), query, key, value, scale, group, settings)
    (own,) = Swapped.apply(exchange, (out.shape[1] * ring.ulysses_degree,), out)  # type: ignore[no-untyped-call]
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
    sizes = torch.tensor(lengths, device="cpu")
    ends = sizes.cumsum(0)
    is_front = torch.arange(int(ends[-1]), device="cpu") < (ends - sizes // 2).repeat_interleave(sizes)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    packed.kv_index = is_front.nonzero().flatten().to(device)
    packed.q_index = (~is_front).nonzero().flatten().to(device)
    return packed


@lru_cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK_TOKENS, _MASK_TOKENS, dtype=torch.bool, device=device).triu(1)


# Process groups of a call.
#
# Megatron and MindSpeed keep static groups in module globals, which they read through functions. The wrapped
# functions return the current placement's group inside a call with a placement, else the original. The globals are
# unchanged, so code outside the call is not affected.

_PARALLEL_STATE = "megatron.core.parallel_state"
_SLICE_TABLE = "megatron.core.models.common.embeddings.rotary_pos_embedding.get_pos_emb_on_this_cp_rank"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Process groups of a call; missing ones keep Megatron's static values.

    Attributes:
        ranks: global ranks of the context-parallel group.
        index: index of this process in `ranks`.
        group: process group of them.
        data: data-parallel group, with and without context parallelism.
    """

    ranks: tuple[int, ...] = ()
    index: int = 0
    group: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None


_current: ContextVar[Placement | None] = ContextVar("current_placement", default=None)

# Function path -> override from the placement; None: call the original.
_ANSWERS: Mapping[str, Callable[[Placement], Any]] = {
    f"{_PARALLEL_STATE}.get_context_parallel_group": lambda placement: placement.group,
    f"{_PARALLEL_STATE}.get_context_parallel_global_ranks": lambda placement: list(placement.ranks) or None,
    f"{_PARALLEL_STATE}.get_context_parallel_world_size": lambda placement: len(placement.ranks) or None,
    f"{_PARALLEL_STATE}.get_context_parallel_rank": lambda placement: placement.index if placement.ranks else None,
    f"{_PARALLEL_STATE}.get_data_parallel_group": lambda placement: placement.data,
}


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Use a placement for calls of this thread."""
    token = _current.set(placement)
    try:
        yield
    finally:
        _current.reset(token)


def hook_parallel_state() -> None:
    """Hook the functions in `_ANSWERS` to return the call's placement, in all modules that imported them."""
    for path, answer in _ANSWERS.items():
        wrap_everywhere(path, _answering(answer))
    wrap_everywhere(_SLICE_TABLE, _whole_table_wrapper)


def _whole_table_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip slicing rotary tables under a one-rank placement: newer versions use the group stored in the module."""

    @wraps(original)
    def slice_table(table: Any, *args: Any, **kwargs: Any) -> Any:
        placement = _current.get()
        return table if placement is not None and len(placement.ranks) == 1 else original(table, *args, **kwargs)

    return slice_table


def _answering(answer: Callable[[Placement], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def placement_wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def asked(*args: Any, **kwargs: Any) -> Any:
            placement = _current.get()
            found = None if placement is None else answer(placement)
            return original(*args, **kwargs) if found is None else found

        return asked

    return placement_wrapper


def wrap_everywhere(path: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function at `path` in its module and in all modules that imported it by name.

    If MindSpeed's patch manager is loaded, the wrapper is registered there. It treats functions as wrappers only if
    their name ends in `wrapper`.
    """
    manager = getattr(sys.modules.get("mindspeed.patch_utils"), "MindSpeedPatchesManager", None)
    if manager is not None:
        manager.register_patch(path, wrapper)
        manager.apply_patches()
        return
    home, name = path.rsplit(".", 1)
    original = getattr(importlib.import_module(home), name)
    wrapped = wrapper(original)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)
