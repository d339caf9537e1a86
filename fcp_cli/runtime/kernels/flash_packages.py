"""FlashAttention 3 and 4 called without PyTorch's adapters, which releases before 2.13 lack.

Arguments are passed by name, and the names are checked first: a package that has renamed one cannot run here, and the
next kernel does. Signatures: `TORCH_LIBRARY` in flash-attention's `hopper/flash_api.cpp` and, for FlashAttention 4,
`flash_attn/cute/interface.py`. Like the adapters, both pairs have the signature of `aten::_flash_attention_forward` and
its backward.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fcp_cli.runtime.kernels.cuda import FlashOperators

_BOUNDS: Final = ("cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "window_size_left", "window_size_right")


def flash_3() -> FlashOperators:
    """Return the operators of FlashAttention 3, which its package registers as `torch.ops.flash_attn_3`.

    Raises:
        ImportError: the package cannot be imported.
        AttributeError: it registers no such operators.
        TypeError: their arguments differ.
    """
    importlib.import_module("flash_attn_interface")
    registered: Any = torch.ops.flash_attn_3
    fwd, bwd = registered.fwd.default, registered.bwd.default
    more = ("max_seqlen_q", "max_seqlen_k", "is_causal", "sm_margin")
    unused = _checked("fwd", fwd, ("q", "k", "v"), (*_BOUNDS, *more, "num_splits"))
    tensors = ("dout", "q", "k", "v", "out", "softmax_lse")
    unused_back = _checked("bwd", bwd, tensors, (*_BOUNDS, *more, "dq", "dk", "dv", "deterministic"))

    def forward(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        tensors, bounds, causal = given[:3], _bounds(given[3:7]), given[8]
        # One split, as the package itself trains with: several are for short queries against a long cache.
        named = {**unused, **bounds, **_window(options, unlimited=-1), "num_splits": 1, "sm_margin": _sm_margin()}
        out, lse, *_ = fwd(*tensors, **{**named, "softmax_scale": options["scale"], "is_causal": causal})
        return out, lse

    def backward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
        tensors, bounds, causal = given[:6], _bounds(given[6:10]), given[11]
        grads = {name: torch.empty_like(tensor) for name, tensor in zip(("dq", "dk", "dv"), tensors[1:4], strict=True)}
        named = {**unused_back, **bounds, **_window(options, unlimited=-1), **grads, "sm_margin": _sm_margin()}
        named |= {"softmax_scale": options["scale"], "is_causal": causal}
        bwd(*tensors, **{**named, "deterministic": torch.are_deterministic_algorithms_enabled()})
        return tuple(grads.values())

    return FlashOperators(forward=forward, backward=backward)


def flash_4() -> FlashOperators:
    """Return the functions of FlashAttention 4; raises as `flash_3` does."""
    module = importlib.import_module("flash_attn.cute.interface")
    fwd, bwd = module._flash_attn_fwd, module._flash_attn_bwd
    named = (*_BOUNDS, "max_seqlen_q", "max_seqlen_k", "num_splits", "causal", "return_lse")
    _require("_flash_attn_fwd", inspect.signature(fwd).parameters, ("q", "k", "v"), named)
    tensors = ("q", "k", "v", "out", "dout", "lse")
    _require("_flash_attn_bwd", inspect.signature(bwd).parameters, tensors, (*_BOUNDS, "causal", "deterministic"))

    def forward(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        named = {**_bounds(given[3:7]), **_window(options, unlimited=None), "causal": given[8], "num_splits": 1}
        out, lse, *_ = fwd(*given[:3], softmax_scale=options["scale"], return_lse=True, **named)
        return out, lse

    def backward(*given: Any, **options: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, out, lse, cu_q, cu_k, *_, causal = given[:12]
        named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal, **_window(options, unlimited=None)}
        deterministic = torch.are_deterministic_algorithms_enabled()
        tensors = (q, k, v, out, dout, lse)
        dq, dk, dv, *_ = bwd(*tensors, softmax_scale=options["scale"], deterministic=deterministic, **named)
        return dq, dk, dv

    return FlashOperators(forward=forward, backward=backward)


def _bounds(given: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), given, strict=True))


def _window(options: dict[str, Any], *, unlimited: int | None) -> dict[str, int | None]:
    return {name: options.get(name, unlimited) for name in ("window_size_left", "window_size_right")}


def _sm_margin() -> int:
    """Return the multiprocessors that the process keeps free for messages, as PyTorch's adapter passes them."""
    carveout: Callable[[], int | None] = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)
    return carveout() or 0


def _checked(name: str, operator: Any, tensors: Sequence[str], named: Collection[str]) -> dict[str, None]:
    """Check an operator's schema; return its other arguments without a default: those of the release of May 2025."""
    arguments = operator._schema.arguments
    _require(name, [one.name for one in arguments], tensors, named)
    return {one.name: None for one in arguments[len(tensors) :] if not one.has_default_value()}


def _require(name: str, found: Iterable[str], tensors: Sequence[str], named: Collection[str]) -> None:
    """Raise TypeError unless a function begins with `tensors`, in this order, and has all arguments `named`."""
    names = list(found)
    if names[: len(tensors)] != list(tensors):
        raise TypeError(f"its {name} takes {', '.join(names[: len(tensors)])} first, not {', '.join(tensors)}")
    if missing := [one for one in named if one not in names]:
        raise TypeError(f"its {name} has no argument {', '.join(missing)}")
