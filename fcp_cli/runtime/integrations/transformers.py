"""Unmodified Hugging Face decoders under a plan, through transformers' own attention interface.

    model = AutoModelForCausalLM.from_pretrained(...)
    prepare(model)
    ...
    logits = model(input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids).logits

The ring is bound to each call of the model: a hook adds it to the keyword arguments, which transformers hands down to
every layer and keeps for recomputation. So gradient checkpointing, in both its modes, uses the right ring.

No mask function is registered beside the attention: transformers then builds no mask at all, which also spares a wait
for the device in every forward.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.runtime.ring import attention, current_ring

NAME = "fcp"
"""The attention implementation's name in transformers."""


def prepare(model: transformers.PreTrainedModel) -> None:
    """Make a decoder's attention run on the ring of the current micro-batch. Do it before DDP or `fully_shard`.

    To evaluate or generate outside a plan, go back with ``model.set_attn_implementation("sdpa")``.

    Raises:
        RunError: the model attends in a way that a ring of shards cannot follow.
    """
    _check_config(model.config)
    transformers.AttentionInterface.register(NAME, _attention_forward)
    model.set_attn_implementation(NAME)
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module.register_forward_pre_hook(_bind_ring, with_kwargs=True)


def _check_config(config: Any) -> None:
    """Refuse what is known before the first forward."""
    name = config.model_type
    if hasattr(config, "vision_config") or getattr(config, "is_encoder_decoder", False):
        raise RunError(f"a {name} model is not a plain decoder; prepare its language model")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise RunError(f"the {name} model has layers of {', '.join(sorted(kinds))}; a plan is for full attention only")
    if getattr(config, "attention_dropout", 0.0):
        raise RunError(f"the {name} model has attention_dropout {config.attention_dropout}; set it to 0 in its config")
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) is not None:
        raise RunError(f"the {name} model has sliding_window {config.sliding_window}; set it to None in its config")


def _bind_ring(
    module: transformers.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before each forward of a model: add the current ring to the call, and refuse what would be ignored or wrong."""
    if module.config._attn_implementation != NAME:
        return None
    ring = kwargs.get("ring") or current_ring.get()
    if ring is None:
        raise RunError(
            "the model was called outside a micro-batch; call it in the loop over a step, or go back with "
            "model.set_attn_implementation('sdpa')"
        )
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    for name, mend in _REFUSED_ARGUMENTS.items():
        if given.get(name) is not None:
            raise RunError(f"the model was given {name}, which it cannot use under a plan; {mend}")
    if given.get("position_ids") is None:
        raise RunError("the model was given no position_ids; pass position_ids=micro_batch.position_ids")
    return args, {**kwargs, "ring": ring, "use_cache": False}


_REFUSED_ARGUMENTS = {
    "attention_mask": "leave it out: the plan says which tokens belong together",
    "labels": "leave them out and use micro_batch.loss(logits)",
    "past_key_values": "leave them out: training keeps no cache",
}


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
    """transformers' signature of an attention; query [1, heads, tokens, head_dim], key and value with fewer heads."""
    ring = kwargs.get("ring")
    if ring is None:
        raise RunError(
            f"{type(module).__name__} was called without its ring; call prepare(model) of "
            f"{__name__}, and use a model class that hands keyword arguments down to its attention"
        )
    _check_call(module, attention_mask, kwargs)
    out = attention(query, key, value, ring=ring, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _check_call(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse what attention over shards does not do, instead of leaving it out."""
    is_causal = kwargs.get("is_causal")
    refused = {
        "an attention mask": attention_mask is not None,
        "attention dropout": bool(kwargs.get("dropout")),
        "a sliding window": kwargs.get("sliding_window") is not None,
        "a soft cap on scores": kwargs.get("softcap") is not None,
        "attention sinks": kwargs.get("s_aux") is not None,
        "attention that is not causal": not (getattr(module, "is_causal", True) if is_causal is None else is_causal),
    }
    for what, found in refused.items():
        if found:
            raise RunError(f"{type(module).__name__} asks for {what}, which a plan cannot follow")
