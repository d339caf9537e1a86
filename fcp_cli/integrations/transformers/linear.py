"""Runs linear attention and state-space layers of transformers models on the ring of the current micro-batch.

Linear attention layers (Qwen3-Next, Qwen3.5, OLMo Hybrid) call two functions of their Python module: the short
convolution and the gated delta rule. Mamba-2 layers (Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba2) call the
convolution and a scan, or, with `mamba_ssm`, one fused kernel, which the hooks disable in favour of the two. These
functions are hooked once per Python module. Like attention, they get the ring among the arguments of the model's call,
so recomputation uses the right one. Without a ring, they run unchanged.
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
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.runtime.recurrent import DeltaRule, DeltaTokens, Scan, ScanTokens, run_rule, short_convolution

_CONVOLUTION = "causal_conv1d_fn"
_RULES = ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan")
_HOOKED = "_fcp_hooked"

KEYWORDS = "fcp_keywords"
"""Keyword argument with the names of the keywords that a model was called with, passed down like its ring."""

_tokens_apart: ContextVar[bool] = ContextVar("tokens_apart", default=False)


@contextmanager
def tokens_apart() -> Iterator[None]:
    """Make recurrent layers treat each token as a separate sequence if they have no ring; used by the probe."""
    token = _tokens_apart.set(True)
    try:
        yield
    finally:
        _tokens_apart.reset(token)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear-attention and state-space layers that can run on rings, by name."""
    return {name: module for name, module in model.named_modules() if _is_linear(module)}


def hook_linear_layers(model: nn.Module) -> None:
    """Make a model's recurrent layers run on the ring passed to them."""
    for layer in linear_layers(model).values():
        functions = _written_in(layer)
        for name, hook in _HOOKS.items():
            if name in functions and not hasattr(functions[name], _HOOKED):
                functions[name] = hook(functions[name])
                setattr(functions[name], _HOOKED, True)


def _is_linear(module: nn.Module) -> bool:
    has_convolution = isinstance(getattr(module, "conv1d", None), nn.Conv1d)
    written = _written_in(module)
    return has_convolution and _CONVOLUTION in written and any(rule in written for rule in _RULES)


def _written_in(module: nn.Module) -> dict[str, Any]:
    return vars(sys.modules[type(module).__module__])


def _hooked_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    takes_packs = find_spec("fla") is not None  # transformers then calls its kernels, else its own code

    @wraps(rule)
    def hooked(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        on_ring, ring = _ring_of(given)
        if not on_ring or (ring is None and not _tokens_apart.get()):
            out: tuple[Tensor, Tensor | None] = rule(query, key, value, **given)
            return out
        if given.get("initial_state") is not None or given.pop("output_final_state", False):
            raise RunError("linear attention was given or asked for a state, which training under a plan keeps none of")
        tokens = DeltaTokens(query, key, value, given.pop("g"), given.pop("beta"))
        given = {name: option for name, option in given.items() if name in _OPTIONS}
        if ring is None:
            apart, _ = rule(*(part.transpose(0, 1) for part in tokens[:3]), **_gates(tokens), **given)
            return apart.transpose(0, 1), None
        return _on_ring(DeltaRule(call=rule, takes_packs=takes_packs, options=given), tokens, ring), None

    return hooked


def _ring_of(given: dict[str, Any]) -> tuple[bool, Any]:
    """Remove the keywords of `prepare` from a call; return whether it has a ring, and the ring."""
    given.pop(KEYWORDS, None)
    return "ring" in given, given.pop("ring", None)


_OPTIONS = ("use_qk_l2norm_in_kernel", "scale", "chunk_size")


def _gates(tokens: DeltaTokens) -> dict[str, Tensor]:
    return {"g": tokens.decay.transpose(0, 1), "beta": tokens.strength.transpose(0, 1)}


def _hooked_scan(scan: Callable[..., Any]) -> Callable[..., Any]:
    takes_packs = find_spec("mamba_ssm") is not None

    @wraps(scan)
    def hooked(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, **given: Any) -> Any:
        on_ring, ring = _ring_of(given)
        if not on_ring or (ring is None and not _tokens_apart.get()):
            return scan(x, dt, decay, b, c, **given)
        if given.get("initial_states") is not None or given.get("return_final_states"):
            raise RunError("a state space was given or asked for a state, which training under a plan keeps none of")
        if given.get("z") is not None:
            raise RunError("a state space was given a gate for its kernel; a plan drives those that gate behind it")
        tokens = ScanTokens(c, b, x, _steps(dt, **given))
        rule = Scan(
            call=scan, takes_packs=takes_packs, decay=decay, skip=given.get("D"), chunk_size=given["chunk_size"]
        )
        if ring is None:
            apart: Tensor = rule.alone(tuple(part.transpose(0, 1) for part in tokens), (1,))
            return apart.transpose(0, 1)
        return _on_ring(rule, tokens, ring)

    return hooked


def _steps(
    dt: Tensor,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """Return the scan's time steps as its kernels compute them, in the same precision."""
    wide = dt.to(torch.promote_types(dt.dtype, torch.float32))
    wide = wide if dt_bias is None else wide + dt_bias.to(wide.dtype)
    return (functional.softplus(wide) if dt_softplus else wide).clamp(*dt_limit)


def _hooked_whole(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Hook the fused kernel of a layer: on rings it returns None, so that the layer calls the separate kernels."""

    @wraps(whole)
    def hooked(*args: Any, **given: Any) -> Any:
        on_ring, ring = _ring_of(given)
        return None if on_ring and (ring is not None or _tokens_apart.get()) else whole(*args, **given)

    return hooked


def _hooked_convolution(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(convolve)
    def hooked(hidden_states: Tensor, weight: Tensor, *args: Any, **given: Any) -> Tensor:
        on_ring, ring = _ring_of(given)

        def run(rows: Tensor) -> Tensor:
            return convolve(rows, weight, *args, **given)

        if not on_ring or (ring is None and not _tokens_apart.get()):
            return run(hidden_states)
        if ring is None:
            return run(hidden_states.permute(2, 1, 0)).permute(2, 1, 0)
        return _broken_off(short_convolution)(run, hidden_states, weight.shape[-1], ring)

    return hooked


def _on_ring(rule: DeltaRule | Scan, tokens: DeltaTokens | ScanTokens, ring: Any) -> Tensor:
    return _broken_off(run_rule)(rule, tokens, ring)


_HOOKS = {
    "torch_chunk_gated_delta_rule": _hooked_rule,
    "mamba2_chunk_scan": _hooked_scan,
    "mamba2_split_conv1d_scan_combined": _hooked_whole,
    _CONVOLUTION: _hooked_convolution,
}


def _broken_off(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that breaks torch.compile graphs, which must not trace rings or communication."""
    if not torch.compiler.is_compiling():
        return function
    disable: Any = torch.compiler.disable
    broken_off: Callable[..., Tensor] = disable(function)
    return broken_off
