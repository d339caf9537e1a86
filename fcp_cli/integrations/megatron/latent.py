"""Multi-latent attention (MLA) under a plan, whose layers compute and rotate their own queries and keys.

Other layers get the rotary table as an argument; these compute it themselves, also in a recomputed forward. If they
see packed sequences, they drop the batch dimension, which the rotation of unpacked sequences needs. So the sequences
are hidden while a layer computes queries, keys and values, and its rotary table, made for the longest sequence of the
call, is sliced to the positions of the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

_HEADS = "get_query_key_value_tensors"
_current: ContextVar[Any] = ContextVar("sequences", default=None)
"""Sequences of the layer that makes queries, keys and values now: `model.RingSequences`."""


def is_latent(layer: Any) -> bool:
    """Return whether an attention layer uses multi-latent attention (MLA)."""
    return hasattr(layer.config, "kv_lora_rank") and hasattr(layer, _HEADS) and hasattr(layer, "q_head_dim")


def hook_latent(layer: Any) -> None:
    """Hook a layer to rotate queries and keys by the positions of the call's shard, if there is one."""
    setattr(layer, _HEADS, partial(_heads, getattr(layer, _HEADS)))
    layer.rotary_pos_emb.register_forward_pre_hook(_ask_for_longest)
    layer.rotary_pos_emb.register_forward_hook(_cut)


def _heads(
    original: Callable[..., Any],
    hidden_states: Tensor,
    key_value_states: Any = None,
    position_ids: Any = None,
    packed_seq_params: Any = None,
    **kwargs: Any,
) -> Any:
    """Implement `get_query_key_value_tensors` without packed sequences; heads are [tokens, 1, heads, size]."""
    is_planned = getattr(packed_seq_params, "positions", None) is not None
    token = _current.set(packed_seq_params if is_planned else None)
    try:
        given = None if is_planned else packed_seq_params
        return original(hidden_states, key_value_states, position_ids, given, **kwargs)
    finally:
        _current.reset(token)


def _ask_for_longest(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    sequences = _current.get()
    return None if sequences is None else (sequences.max_seqlen_q, *args[1:])


def _cut(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    sequences = _current.get()
    return None if sequences is None else cut_table(output, sequences.positions)


def cut_table(output: Any, positions: Tensor) -> Any:
    """Slice a rotary table [longest, 1, 1, dim] to [tokens, 1, 1, dim]; YaRN returns (table, factor)."""
    table, *rest = output if isinstance(output, tuple) else (output,)
    cut = table.index_select(0, positions)
    return (cut, *rest) if isinstance(output, tuple) else cut
