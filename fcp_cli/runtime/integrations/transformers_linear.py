"""Linear attention of transformers' models on the ring of the micro-batch whose arguments reach it.

Its layers (Qwen3-Next, Qwen3.5, OLMo Hybrid) call two functions of the module that they are written in: the short
convolution and the gated delta rule. Both are hooked there, once for a module. They are given what the model was called
with, and so its ring, as attention is: recomputation uses the right one. Without a ring they do what they did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.runtime.linear_attention import DeltaRule, Tokens, gated_delta_rule
from fcp_cli.runtime.linear_convolution import short_convolution

_RULE = "torch_chunk_gated_delta_rule"
_CONVOLUTION = "causal_conv1d_fn"
_HOOKED = "_fcp_hooked"

_tokens_apart: ContextVar[bool] = ContextVar("tokens_apart", default=False)


@contextmanager
def tokens_apart() -> Iterator[None]:
    """Let linear attention that is given a ring, None, take each token for a sequence of its own."""
    token = _tokens_apart.set(True)
    try:
        yield
    finally:
        _tokens_apart.reset(token)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of linear attention that can run on rings, by their names."""
    return {name: module for name, module in model.named_modules() if _is_linear(module)}


def hook_linear_layers(model: nn.Module) -> None:
    """Make a model's layers of linear attention run on the ring that they are given; nothing to do for one of none."""
    for layer in linear_layers(model).values():
        functions = _written_in(layer)
        for name, hook in ((_RULE, _hooked_rule), (_CONVOLUTION, _hooked_convolution)):
            if not hasattr(functions[name], _HOOKED):
                functions[name] = hook(functions[name])
                setattr(functions[name], _HOOKED, True)


def _is_linear(module: nn.Module) -> bool:
    has_convolution = isinstance(getattr(module, "conv1d", None), nn.Conv1d)
    return has_convolution and {_RULE, _CONVOLUTION} <= _written_in(module).keys()


def _written_in(module: nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(module).__module__])


def _hooked_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    takes_packs = find_spec("fla") is not None  # transformers then calls its kernels, else its own code

    @wraps(rule)
    def hooked(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        on_ring, ring = "ring" in given, given.pop("ring", None)
        if not on_ring or (ring is None and not _tokens_apart.get()):
            out: tuple[Tensor, Tensor | None] = rule(query, key, value, **given)
            return out
        if given.get("initial_state") is not None or given.pop("output_final_state", False):
            raise RunError("linear attention was given or asked for a state, which training under a plan keeps none of")
        tokens = Tokens(query, key, value, given.pop("g"), given.pop("beta"))
        given = {name: option for name, option in given.items() if name in _OPTIONS}
        if ring is None:
            apart, _ = rule(*(part.transpose(0, 1) for part in tokens[:3]), **_gates(tokens), **given)
            return apart.transpose(0, 1), None
        return _broken_off(gated_delta_rule)(
            DeltaRule(call=rule, takes_packs=takes_packs, options=given), tokens, ring
        ), None

    return hooked


_OPTIONS = ("use_qk_l2norm_in_kernel", "scale", "chunk_size")


def _gates(tokens: Tokens) -> dict[str, Tensor]:
    return {"g": tokens.decay.transpose(0, 1), "beta": tokens.strength.transpose(0, 1)}


def _hooked_convolution(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(convolve)
    def hooked(hidden_states: Tensor, weight: Tensor, *args: Any, **given: Any) -> Tensor:
        on_ring, ring = "ring" in given, given.pop("ring", None)

        def run(rows: Tensor) -> Tensor:
            return convolve(rows, weight, *args, **given)

        if not on_ring or (ring is None and not _tokens_apart.get()):
            return run(hidden_states)
        if ring is None:
            return run(hidden_states.permute(2, 1, 0)).permute(2, 1, 0)
        return _broken_off(short_convolution)(run, hidden_states, weight.shape[-1], ring)

    return hooked


def _broken_off(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that graphs of torch.compile break for: they must look neither into rings nor into hops."""
    if not torch.compiler.is_compiling():
        return function
    disable: Any = torch.compiler.disable
    broken_off: Callable[..., Tensor] = disable(function)
    return broken_off
