"""Hooks a GPTModel or HybridModel to follow the micro-batch of each call: attention, rotary tables, recomputation.

No state is kept in modules or in Megatron's parallel state. The ring is an attribute of the call's PackedSeqParams,
which every layer passes on and recomputation saves. The rotary table is sliced to the positions of the shard, and is a
layer argument too. So a backward after another forward, and a recomputed forward, use the right ring.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from torch import Tensor, nn

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.errors import RunError
from fcp_cli.integrations.base import Refusals, refuse
from fcp_cli.integrations.megatron import checks, multi_token
from fcp_cli.integrations.megatron.checks import balances_experts, is_sharded, predicts_several
from fcp_cli.integrations.megatron.data import PlannedMicroBatch, current_microbatch
from fcp_cli.integrations.megatron.router_losses import hook_losses
from fcp_cli.integrations.megatron.transformer_engine import attend
from fcp_cli.plan.setup import Pipeline
from fcp_cli.runtime.recompute import LayerLevels
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.transport import ProcessTransport

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
    model.forward = partial(_attention_forward, model.forward, place)
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


def _attention_forward(original: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:
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


# Multi-latent attention (MLA) under a plan, whose layers compute and rotate their own queries and keys.
#
# Other layers get the rotary table as an argument; these compute it themselves, also in a recomputed forward. If they
# see packed sequences, they drop the batch dimension, which the rotation of unpacked sequences needs. So the
# sequences are hidden while a layer computes queries, keys and values, and its rotary table, made for the longest
# sequence of the call, is sliced to the positions of the shard.

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


# As-needed recomputation for a GPTModel: each micro-batch recomputes as few layers as its tokens per rank allow.
#
# Megatron's own `recompute_num_layers` recomputes whole layers including their rings, so all ranks of a ring would
# have to recompute the same layers. Here, fcp's checkpoint wraps each layer and saves the output of attention, so
# nothing is communicated again, and every rank chooses by itself.


def recompute_as_needed(
    chunk: Any, model: Any, levels: Sequence[RecomputeLevel], pipeline: Pipeline | None, stage: int
) -> None:
    """Hook each layer of a model to choose its recomputation level per call.

    Args:
        chunk: model in Megatron's wrappers.
        model: model inside the wrappers, already hooked.
        levels, pipeline: recomputation levels and pipeline of the plan.
        stage: pipeline stage of this process.

    Raises:
        RunError: a setting of the job prevents recomputing single layers.
    """
    refuse(
        (is_refused, f"the plan recomputes layers as needed, but {reason}, or plan with --recompute selective")
        for is_refused, reason in _recompute_refusals(chunk, model)
    )
    config, layers = model.config, model.decoder.layers
    # Levels count all tokens of a rank, of which a process holds a fraction under sequence parallelism.
    rows = config.tensor_model_parallel_size if config.sequence_parallel else 1
    share = None
    if pipeline is not None:
        again = pipeline.recompute_seconds_per_token
        share = again[stage] / levels[-1].seconds_per_token if again else 1.0
    chosen = LayerLevels(levels, layers=len(layers), tokens_per_row=rows, share=share)
    for index, layer in enumerate(layers):
        layer.forward = partial(_recomputed_forward, chosen, index, layer.forward)
        chosen.recompute_activation(layer.mlp)


def _recomputed_forward(
    chosen: LayerLevels, index: int, layer: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer; Megatron passes hidden_states by name, `LayerLevels.run` takes it by position."""
    return chosen.run(index, layer, hidden_states, *args, **kwargs)


def _recompute_refusals(chunk: Any, model: Any) -> Refusals:
    """Yield settings that contradict the plan, each with a clause."""
    config = model.config
    granularity = config.recompute_granularity
    yield granularity is not None, f"the job recomputes them by itself; drop --recompute-granularity {granularity}"
    yield not isinstance(model, GPTModel), f"a {type(model).__name__} has other layers; train a GPTModel"
    yield predicts_several(config), "the model has layers of multi-token prediction, too; drop --mtp-num-layers"
    yield is_sharded(chunk), "Megatron-FSDP gathers weights layer by layer; drop --use-megatron-fsdp"
    yield bool(config.hidden_dropout), f"hidden dropout is {config.hidden_dropout}; add --hidden-dropout 0"
    # These communicate within the layer, so their ranks would have to recompute the same layers.
    yield config.expert_model_parallel_size > 1, "ranks share experts; drop --expert-model-parallel-size"
    yield balances_experts(config), "the router has a loss; drop --moe-aux-loss-coeff and --moe-z-loss-coeff"
    yield (
        config.cpu_offloading or bool(getattr(config, "fine_grained_activation_offloading", False)),
        "the job offloads activations; drop --cpu-offloading-num-layers and --fine-grained-activation-offloading",
    )


# The software stack around a model: plain megatron-core here; MindSpeed patches it and overrides most of this.


class MegatronStack:
    """Plain megatron-core with context-parallel size 1, so that no static group must be hidden.

    Attributes:
        even_chunks: whether sequences are padded to equal chunks.
        engine_rings: whether Transformer Engine's rings are used if the model has them.
        follows_masks: whether it supports plans with attention masks.
        recomputes_as_needed: whether it supports as-needed recomputation.
    """

    even_chunks = False
    engine_rings = True
    follows_masks = True
    recomputes_as_needed = True

    @property
    def name(self) -> str:
        """Name and version, for messages."""
        return f"megatron-core {checks.megatron_version()}"

    def check(self, config: Any, model: Any) -> None:
        """Raise RunError if this configuration, or this model, cannot follow a plan."""
        checks.require(checks.MODELS)
        refuse(checks.config_refusals(config))
        if checks.balances_experts(config):
            checks.require(checks.ROUTERS)
        if checks.predicts_several(config):
            checks.require(multi_token.HOOKED)
        refuse(checks.layer_refusals(model), checks.core_refusals(model))

    def hook(self, model: Any, transport: ProcessTransport) -> int:
        """Hook the model to follow the micro-batch of each call; return its attention calls per forward."""
        if checks.balances_experts(model.config):
            hook_losses(model)
        repeated = multi_token.hook_multi_token(model) if checks.predicts_several(model.config) else 0
        return hook_model(model) + repeated

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context in which the schedule runs one step."""
        return nullcontext()

    def around_script(self) -> AbstractContextManager[None]:
        """Return the context in which the script's forward step and its loss function run."""
        return nullcontext()

    def without_ring(self, model: Any, layer: Any) -> AbstractContextManager[None]:
        """Return a context in which this layer computes attention over whole sequences without a ring."""
        return nullcontext()  # modules run without a ring unless a micro-batch is current

    def totals(self, reports: Any) -> Any:
        """Convert the loss reports per micro-batch to the schedule's result for the script."""
        return reports


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
