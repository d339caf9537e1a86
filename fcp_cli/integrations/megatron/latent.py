"""Multi-latent attention under a plan: each of its layers makes and rotates its own queries and keys.

Other layers are given their rotary table as an argument; these look it up themselves, in forward and again where the
forward is recomputed. Given packed sequences, they drop the batch dimension, which the rotation of unpacked
sequences wants. So while a layer makes queries, keys and values it is not told of sequences, and its table is that of
the call's: of their longest, cut to the positions of the shard.
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
    """Return whether an attention layer is one of multi-latent attention (MLA)."""
    return hasattr(layer.config, "kv_lora_rank") and hasattr(layer, _HEADS) and hasattr(layer, "q_head_dim")


def hook_latent(layer: Any) -> None:
    """Make a layer rotate its queries and keys by the positions of the call's shard, if the call has one."""
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
    """Megatron's signature of it; heads come out as [tokens, 1, heads, size]."""
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
    """Cut a rotary table [longest, 1, 1, dim] to [tokens, 1, 1, dim]; YaRN returns the table with a factor."""
    table, *rest = output if isinstance(output, tuple) else (output,)
    cut = table.index_select(0, positions)
    return (cut, *rest) if isinstance(output, tuple) else cut
