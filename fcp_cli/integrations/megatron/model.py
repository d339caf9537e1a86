"""Hooks attention and rotary embeddings of a GPTModel or HybridModel to follow the micro-batch of each call.

No state is kept in modules or in Megatron's parallel state. The ring is an attribute of the call's PackedSeqParams,
which every layer passes on and recomputation saves. The rotary table is sliced to the positions of the shard, and is a
layer argument too. So a backward after another forward, and a recomputed forward, use the right ring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron.data.microbatch import PlannedMicroBatch, current_microbatch
from fcp_cli.integrations.megatron.latent import cut_table, hook_latent, is_latent
from fcp_cli.integrations.megatron.transformer_engine import attend
from fcp_cli.runtime.recomputation.as_needed import LayerLevels
from fcp_cli.runtime.ring_attention.attention import attention
from fcp_cli.runtime.ring_attention.ring import Ring

PARAMS = "packed_seq_params"


@dataclass
class RingSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's description of packed sequences, extended by the ring of the call.

    Its format is not "thd", with which Megatron would apply rotary embeddings for its own token layout (equal chunks of
    a static group) instead of the table sliced for the shard.
    """

    ring: Ring | None = None
    positions: Tensor | None = None  # [tokens], for layers that compute their own rotary table
    owners: Tensor | None = None  # of `PlannedMicroBatch`
    lengths: tuple[int, ...] = ()
    ahead: Any = None  # `multi_token.TokensAhead`, if the model predicts several tokens
    packed: PackedSeqParams | None = None  # used instead if Transformer Engine computes attention


def hook_model(model: Any, hook_layer: Callable[[Attention], None] | None = None) -> int:
    """Hook one GPTModel or HybridModel, once; return the number of its attention layers.

    Args:
        hook_layer: hooks one attention layer to the ring of the call; None: to fcp's own ring attention.
    """
    signature = inspect.signature(type(model).forward)
    place = list(signature.parameters).index(PARAMS) - 1  # index among positional arguments, without self
    # Not as a hook of the module: Megatron-FSDP calls the forward of its wrapped module by name.
    model.forward = partial(_forward, model.forward, place)
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None and model.position_embedding_type != "mrope":  # mRoPE's table is made from position_ids
        rotary.register_forward_hook(_cut_rotary_table)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer in layers:
        (hook_layer or _hook_core_attention)(layer)
    for module in model.modules():
        if getattr(module, "local_tokens_per_expert", None) is not None:
            _hook_router(module)
    return len(layers)


def _forward(original: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:
    """Run a model's forward with the micro-batch's `RingSequences` as packed_seq_params."""
    microbatch = current_microbatch.get()
    if microbatch is None:
        return original(*args, **kwargs)
    input_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    if input_ids is not None and tuple(input_ids.shape) != (1, microbatch.tokens):
        raise RunError(
            f"step {microbatch.row.step}, micro-batch {microbatch.row.order}: the model was given input_ids of shape "
            f"{tuple(input_ids.shape)}, but the micro-batch is {(1, microbatch.tokens)}; the script must pass on the "
            "batches of its data iterator"
        )
    sequences = _sequences(microbatch)
    # Passed by position.
    if len(args) > place:
        return original(*args[:place], sequences, *args[place + 1 :], **kwargs)
    return original(*args, **{**kwargs, PARAMS: sequences})


def _sequences(microbatch: PlannedMicroBatch) -> RingSequences:
    # Rounded up to a power of two, since Megatron caches rotary tables of only 32 lengths.
    longest = 1 << (microbatch.longest_tokens - 1).bit_length()
    return RingSequences(
        qkv_format="sbhd",
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        ring=microbatch.ring,
        positions=microbatch.positions,
        owners=microbatch.owners,
        lengths=microbatch.lengths,
        packed=microbatch.packed,
    )


def _cut_rotary_table(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    microbatch = current_microbatch.get()
    return None if microbatch is None else cut_table(output, microbatch.positions)


def _hook_core_attention(layer: Attention) -> None:
    """Compute attention on the call's ring, if it has one. Modules, state and checkpoints are unchanged."""
    core = layer.core_attention
    config = layer.config
    scale = config.kv_channels**-0.5 if config.softmax_scale is None else config.softmax_scale
    if is_latent(layer):
        scale = layer.softmax_scale
        hook_latent(layer)
    core.forward = partial(_core_attention, core, core.forward, scale)


def _core_attention(
    core: Any,
    original: Callable[..., Tensor],
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Implement Megatron's core attention; query [tokens, 1, heads, size] -> [tokens, 1, heads * value size]."""
    sequences = kwargs.get(PARAMS)
    if not isinstance(sequences, RingSequences) or sequences.ring is None:
        return original(query, key, value, attention_mask, *args, **kwargs)
    if kwargs.get("attention_bias") is not None:
        raise RunError("the model adds a bias to attention scores, which a plan cannot follow")
    ring = sequences.ring
    if sequences.packed is not None:
        # Counted here, since Transformer Engine bypasses `attention`, which counts itself.
        ring.attention_calls += 1
        packed = (tensor.squeeze(1) for tensor in (query, key, value))
        run = partial(original, *packed, None, *args)
        return LayerLevels.attend(partial(attend, core, run, {**kwargs, PARAMS: sequences.packed}))
    out = attention(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), ring=ring, scale=scale)
    merged: Tensor = out.permute(2, 0, 1, 3).flatten(2)
    return merged


def _hook_router(router: Any) -> None:
    """Count tokens per expert without padding, for loss-free balancing (expert bias).

    Megatron counts padding, and counts in the forward with gradients, which recomputation may run when no micro-batch
    is current. Under a plan, the first forward counts instead.
    """
    router._apply_expert_bias = lambda *_, **__: None
    router.register_forward_hook(_count_tokens)


def _count_tokens(router: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    microbatch = current_microbatch.get()
    if microbatch is None:
        return
    is_planned, routing_map = microbatch.is_planned, output[1]  # [tokens], [tokens, experts]
    if router.config.sequence_parallel:
        share = parallel_state.get_tensor_model_parallel_rank()
        is_planned = is_planned.chunk(parallel_state.get_tensor_model_parallel_world_size())[share]
    router.local_tokens_per_expert += (routing_map.bool() & is_planned[:, None]).sum(dim=0)


def unwrapped(chunk: nn.Module) -> Any:
    """Return the GPTModel or HybridModel inside DDP and precision wrappers."""
    inner: Any = chunk
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    if not isinstance(inner, model_classes()):
        raise RunError(
            f"the model is a {type(inner).__name__}, not a GPTModel or HybridModel of megatron-core; a plan cannot "
            "drive it"
        )
    return inner


def model_classes() -> tuple[type, ...]:
    """Return the language model classes of this megatron-core; newer versions also have HybridModel."""
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        return (GPTModel,)
    return GPTModel, HybridModel


def device_of(models: Iterable[nn.Module]) -> torch.device:
    """Return the device of the models' parameters; single models may have none."""
    return next(parameter.device for model in models for parameter in model.parameters())
