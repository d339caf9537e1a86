"""Hooks attention layers to use the ring of each call.

The ring is an attribute of the call's PackedSeqParams, which every layer passes on and recomputation saves. Only the
core attention sees packed sequences, since with them megatron-core 0.12 would apply rotary embeddings for its static
group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from torch import Tensor, nn

from fcp_cli.integrations.megatron.data.microbatch import current_microbatch
from fcp_cli.integrations.megatron.model import PARAMS, RingSequences
from fcp_cli.integrations.mindspeed.placement import wrap_everywhere
from fcp_cli.runtime.ring_attention.ring import Ring

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
        utils.unflatten_softmax(torch.zeros(2, 2, 8), [2])
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
