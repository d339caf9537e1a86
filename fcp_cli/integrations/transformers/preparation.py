"""Runs unmodified Hugging Face models under a plan, through transformers' own attention interface.

    model = AutoModelForCausalLM.from_pretrained(...)
    prepare(model)
    ...
    out = model(input_ids=microbatch.input_ids, position_ids=microbatch.position_ids, labels=microbatch.labels)
    microbatch.normalised(out.loss).backward()

Without `labels`, the output has `logits`, for `microbatch.loss(logits)`.

A hook adds the ring to the keyword arguments of each model call, which transformers passes to every layer and saves
for recomputation. So both modes of gradient checkpointing use the right ring.

The encoder of a vision-language model keeps its own attention. Before the model's forward, a hook runs the encoder on
the images assigned to this rank, sends the embeddings to the ranks that hold their tokens, and passes them on as
`mm_encoder_outputs`, transformers' own argument for precomputed embeddings.

No mask function is registered with the attention, so transformers builds no mask, which also avoids a device
synchronization in every forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import Recompute
from fcp_cli.errors import RunError
from fcp_cli.integrations.base import Refusals, refuse
from fcp_cli.integrations.transformers.linear import KEYWORDS, hook_linear_layers, linear_layers
from fcp_cli.integrations.transformers.loss import prepare_loss, takes_labels
from fcp_cli.integrations.transformers.probe import probe
from fcp_cli.models.ring_exactness import missing_for_rings
from fcp_cli.runtime.connections import expect_halo_pattern
from fcp_cli.runtime.exchange import exchange
from fcp_cli.runtime.recompute import LayerLevels, recomputed
from fcp_cli.runtime.ring import Ring, current_ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.session import switch_outside
from fcp_cli.runtime.visuals import VisualShard
from fcp_cli.vision.families import FAMILIES

NAME = "fcp"
"""The attention implementation's name in transformers."""


def prepare(model: transformers.PreTrainedModel) -> None:
    """Prepare a decoder to run attention on the ring of the current micro-batch. Call it before DDP or `fully_shard`.

    Its linear head, with the same weight, computes the loss if `labels` are given.

    PEFT adapters may be added before or after this call.

    A vision encoder may be frozen before or after this call; it then runs without an autograd graph.

    Inside `fcp_cli.runtime.outside()`, to evaluate or generate, the model uses its original attention.

    Raises:
        RunError: rings cannot compute the model's attention exactly, or other modules mix tokens.
    """
    model = base_model(model)
    own = model.config.get_text_config()._attn_implementation
    text = _run_on_rings(model)
    switch_outside(model, partial(_own_attention, text, own if own != NAME else "sdpa", text.use_cache))
    text.use_cache = False
    prepare_loss(model)


def base_model(model: Any) -> transformers.PreTrainedModel:
    """Return the transformers model inside PEFT adapters; raise RunError if there is none."""
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise RunError(
                f"the adapter {type(adapter).__name__} puts tokens before every sequence, which the plan does not "
                "know; use LoRA"
            )
    found = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(found, transformers.PreTrainedModel):
        raise RunError(
            f"the model is a {type(found).__name__}, not one of transformers; follow the plan in a loop of your own "
            "(docs/how-to/training-loop.md)"
        )
    return found


class SwitchedAttention:
    """A decoder whose attention runs on rings inside `on_rings`, and otherwise as chosen by the script.

    Its loss and head are unchanged. Create it before DDP or `fully_shard`.
    """

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        own = model.config.get_text_config()._attn_implementation
        self._config = _run_on_rings(model)
        if self._config._attn_implementation != NAME:
            raise RunError(f"{type(model).__name__} does not let its attention be replaced; a plan cannot drive it")
        self._config._attn_implementation = self._own = own

    @contextmanager
    def on_rings(self) -> Iterator[None]:
        """Run the model's attention on the ring of the current micro-batch."""
        with self._attending(NAME):
            yield

    @contextmanager
    def off_rings(self) -> Iterator[None]:
        """Use the model's own attention temporarily, inside `on_rings`."""
        with self._attending(self._own):
            yield

    @contextmanager
    def _attending(self, implementation: str) -> Iterator[None]:
        before, self._config._attn_implementation = self._config._attn_implementation, implementation
        try:
            yield
        finally:
            self._config._attn_implementation = before


@contextmanager
def _own_attention(config: Any, implementation: str, use_cache: bool, _: nn.Module) -> Iterator[None]:
    """Undo `prepare` inside this context."""
    config._attn_implementation, config.use_cache = implementation, use_cache
    try:
        yield
    finally:
        config._attn_implementation, config.use_cache = NAME, False


def _run_on_rings(model: transformers.PreTrainedModel) -> Any:
    """Replace the decoder's attention with ring attention bound to each call; return the decoder's config."""
    text = _text_config(model.config)
    refuse(_refusals(text, has_linear_layers=bool(linear_layers(model))))
    hook_linear_layers(model)
    layers = (module for module in model.modules() if hasattr(module, "layer_idx"))
    if any(_window_of(layer) is not None for layer in layers):
        expect_halo_pattern("rings")
    if linear_layers(model):
        expect_halo_pattern("whole heads")
    probe(model, text, _check_call)
    transformers.AttentionInterface.register(NAME, _attention_forward)
    model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.register_forward_pre_hook(_bind_ring, with_kwargs=True)
    if text is not model.config:
        _encoder_owner(model).register_forward_pre_hook(_bring_embeddings, with_kwargs=True)
    return text


def recompute_layers(
    model: transformers.PreTrainedModel, how: Recompute, levels: Sequence[RecomputeLevel] = ()
) -> None:
    """Enable activation checkpointing of a model's layers.

    Vision encoder layers are recomputed entirely, since their attention uses no ring; `activation` skips them.

    Args:
        model: transformers model, before or after `prepare`.
        how: `full` saves only the inputs of layers, `selective` also the outputs of attention, `elementwise` also those
            of matrix products. `activation` recomputes only the MLP's activation function, `none` nothing. `as-needed`
            chooses per layer and call, by the number of tokens.
        levels: recompute levels for `as-needed`: `session.recompute_levels`.

    Raises:
        RunError: `activation` without MLPs of a known name; `as-needed` without levels, or if single layers cannot be
            recomputed.
    """
    if how == "none":
        return
    if how == "activation":
        _recompute_activations(model, always=True)
        return
    # The name before transformers 5 is deprecated there.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    if how == "as-needed":
        _recompute_as_needed(model, levels)
        return
    run: Any = partial(recomputed, keeps_attention=how == "selective", keeps_products=how == "elementwise")
    decoder = set(_decoder(model).modules())
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = run if module in decoder else recomputed


def _recompute_as_needed(model: transformers.PreTrainedModel, levels: Sequence[RecomputeLevel]) -> None:
    """Choose a recompute level per decoder layer and call; a vision encoder recomputes all layers or none."""
    if not levels:
        raise RunError(
            "layers recompute as needed by the levels of a plan, and this one has none; plan with "
            "'fcp plan --recompute as-needed'"
        )
    inside, count = set(_decoder(model).modules()), model.config.get_text_config().num_hidden_layers
    layers: list[Any] = [one for one in _decoder(model).modules() if isinstance(one, GradientCheckpointingLayer)]
    if len(layers) != count:
        raise RunError(
            f"{type(model).__name__} has {count} layers, and {len(layers)} of its modules can be recomputed one by "
            "one; plan with --recompute selective"
        )
    if any(level.recompute == "activation" for level in levels):
        _recompute_activations(model, always=False)
    chosen = LayerLevels(levels, layers=len(layers))
    for index, layer in enumerate(layers):
        layer._gradient_checkpointing_func = partial(chosen.run, index)
    others: list[Any] = [module for module in model.modules() if module not in inside]
    for module in others:
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = recomputed
            module.gradient_checkpointing = levels[0].recompute not in ("none", "activation")


def _recompute_activations(model: transformers.PreTrainedModel, *, always: bool) -> None:
    """Recompute the activation function in the MLP of each decoder layer.

    Args:
        model: transformers model.
        always: whether to recompute in all layers; False: depending on a layer's level.
    """
    mlps = [part for name, part in _decoder(model).named_modules() if name.rpartition(".")[2] in _MLPS]
    if not mlps:
        raise RunError(
            f"{type(model).__name__} has no layers with an {' or '.join(_MLPS)}, whose activation function could be "
            "recomputed; give --recompute elementwise"
        )
    for mlp in mlps:
        LayerLevels.recompute_activation(mlp, always=always)


def _decoder(model: Any) -> nn.Module:
    """Return the language model without its head and vision encoder."""
    decoder: nn.Module = model.get_decoder()
    return decoder


_MLPS = ("mlp", "feed_forward")


def _text_config(config: Any) -> Any:
    """Return the language model's config; reject unsupported multimodal models."""
    if not hasattr(config, "vision_config"):
        return config
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise RunError(f"a {config.model_type} model is not a plain decoder, nor one of {known}; prepare its decoder")
    if getattr(config, "audio_config", None) is not None:
        raise RunError(
            f"the {config.model_type} model has an audio encoder (audio_config), whose inputs no plan brings; load it "
            "with audio_config=None"
        )
    return config.text_config


def _encoder_owner(model: transformers.PreTrainedModel) -> nn.Module:
    """Return the module that calls the encoder: the base model below the head."""
    owner: nn.Module = model.base_model
    if "mm_encoder_outputs" not in inspect.signature(owner.forward).parameters:
        raise RunError(
            f"transformers {transformers.__version__} cannot be given a vision encoder's outputs; install 5.23 or newer"
        )
    return owner


def _refusals(config: Any, *, has_linear_layers: bool) -> Refusals:
    """Yield the refusals of a decoder's config, before the first forward pass."""
    name = config.model_type
    yield getattr(config, "is_encoder_decoder", False), f"a {name} model is not a plain decoder; prepare its decoder"
    known = {"full_attention", "sliding_attention"} | ({"linear_attention", "hybrid"} if has_linear_layers else set())
    kinds = set(getattr(config, "layer_types", None) or ()) - known - _PER_TOKEN
    why = f"has layers of {', '.join(sorted(kinds))}; a plan is for full attention and windows"
    yield bool(kinds), f"the {name} model {missing_for_rings(name) or why}"
    dropout = getattr(config, "attention_dropout", 0.0)
    yield bool(dropout), f"the {name} model has attention_dropout {dropout}; set it to 0 in its config"
    yield (
        bool(getattr(config, "output_router_logits", False)),
        f"the {name} model adds an auxiliary loss of its experts (output_router_logits), which is made of one "
        "rank's tokens of a micro-batch, which the plan chooses; set it to False",
    )


def _bind_ring(
    module: transformers.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add the current ring to each call of a model, and reject arguments that would be ignored or wrong."""
    if module.config.get_text_config()._attn_implementation != NAME:
        return None
    ring = kwargs.get("ring") or current_ring.get()
    if ring is None:
        raise RunError(
            "the model was called outside a micro-batch; call it in the loop over a step, or, to evaluate or generate, "
            "in 'with fcp_cli.runtime.outside():'"
        )
    # Removed arguments are missing in the signature, but may be among the keyword arguments.
    given = {**kwargs, **inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments}
    for name, remedy in _REFUSED_ARGUMENTS.items():
        if _is_given(given.get(name)) and not (name in kwargs and takes_labels(module, given[name], ring)):
            raise RunError(f"the model was given {name}, which it cannot use under a plan; {remedy}")
    if given.get("position_ids") is None:
        raise RunError("the model was given no position_ids; pass position_ids=microbatch.position_ids")
    keywords = (*kwargs.get(KEYWORDS, ()), *kwargs)
    return args, {**kwargs, "ring": ring, "use_cache": False, KEYWORDS: keywords}


_PER_TOKEN: Final = {"mlp", "moe"}  # layer types of Nemotron-H without attention that do not mix tokens


def _is_given(argument: Any) -> bool:
    """Return whether an argument is set; a model may pass a mask per layer type, all None."""
    if isinstance(argument, dict):
        return any(value is not None for value in argument.values())
    return argument is not None


_REFUSED_ARGUMENTS = {
    "attention_mask": "remove it: the plan decides which tokens belong together",
    "labels": "pass microbatch.labels, or remove them and use microbatch.loss(logits)",
    "cache": "remove it: training keeps no cache",
    "past_key_values": "remove them: training keeps no cache",  # the cache's name before transformers 5.24
    "position_bias": "remove it: rings add no bias to scores",
    "pixel_values": "remove them: fetch gives images with their sequence",
    "pixel_values_videos": "remove them: fetch gives videos with their sequence",
}


def _bring_embeddings(
    module: transformers.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Encode this rank's images before each forward pass of a vision-language model, and exchange embeddings.

    Every rank runs the encoder once per micro-batch, even without images, so that all parameters get gradients and the
    collectives of DDP and FSDP2 match.
    """
    ring: Ring | None = kwargs.get("ring")
    if ring is None:
        return None  # not under a plan
    family, visuals = FAMILIES[module.config.model_type], ring.context.visuals
    # Skip the graph of a frozen tower and projector, which would hold activations until the backward.
    parts = [part for name, part in module.named_children() if name != "language_model"]
    is_trained = any(parameter.requires_grad for part in parts for parameter in part.parameters())
    has_graph = torch.is_grad_enabled() and is_trained

    def encode(shown: VisualShard | None) -> Tensor:
        with torch.set_grad_enabled(has_graph):
            return family.encode(module, shown.parts if shown else (), shown.pixels if shown else None)

    ring.context.encoder_calls += 1
    if ring.context.encoder_ahead is not None:
        arrived = ring.context.encoder_ahead.bring(encode, ring.transport)
    elif visuals is None:
        arrived = encode(None)[:0]
    else:
        arrived = exchange(encode(visuals), visuals.route, ring.transport)
    return args, {**kwargs, "mm_encoder_outputs": family.encoder_outputs(arrived, visuals.kinds if visuals else ())}


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface; query [1, heads, tokens, head_dim], possibly fewer kv heads."""
    ring = kwargs.get("ring")
    if ring is None:
        raise RunError(
            f"{type(module).__name__} was called without its ring; call prepare(model) of "
            f"{__name__}, and use a model class that hands keyword arguments down to its attention"
        )
    _check_call(module, attention_mask, kwargs)
    # Both windows include the token itself, as in transformers' masks.
    window, sinks, softcap = kwargs.get("sliding_window"), kwargs.get("s_aux"), kwargs.get("softcap")
    out = attention(query, key, value, ring=ring, scale=scaling, window=window, sinks=sinks, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


# Those that rings compute with, or check, and those that change nothing in attention without a cache.
_ATTENTION_KEYWORDS: Final = {
    *("scaling", "dropout", "is_causal", "sliding_window", "s_aux", "softcap", "ring", KEYWORDS),
    *("position_ids", "cache_position", "use_cache"),
}


def _check_call(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise RunError for features that ring attention lacks."""
    is_causal = kwargs.get("is_causal")
    refused = {
        "an attention mask": attention_mask is not None,
        "attention dropout": bool(kwargs.get("dropout")),
        "attention that is not causal": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    for feature, found in refused.items():
        if found:
            raise RunError(f"{type(module).__name__} asks for {feature}, which a plan cannot follow")
    known = {*_ATTENTION_KEYWORDS, *kwargs.get(KEYWORDS, ())}
    for name, argument in kwargs.items():
        if name not in known and argument is not None and argument is not False:
            raise RunError(
                f"{type(module).__name__} passes {name} to its attention, which rings would ignore; a plan can only be "
                "followed without it"
            )
    expected, window = _window_of(module), kwargs.get("sliding_window")
    if window != expected:
        raise RunError(
            f"{type(module).__name__} asks for a window of {window} tokens where its config says {expected}; which of "
            "both counts is in the masks that a plan does without"
        )


def _window_of(module: nn.Module) -> int | None:
    """Return a layer's sliding window in tokens, by the same rule as transformers' masks; None without one."""
    config = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    kinds, place = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and place is not None:
        return window if kinds[place] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None
