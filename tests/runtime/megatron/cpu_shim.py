"""Lets megatron-core run on the CPU: its calls of CUDA become calls of nothing, and its CUDA tensors CPU tensors.

For tests alone. Import it before megatron.core.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fcp_cli.runtime.inject import after_import

_TO_FLOAT = torch.Tensor.float
_CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU or in page-locked memory are made on the CPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(_CPU if isinstance(arg, (str, torch.device)) else arg for arg in args)
        if not kwargs:
            return function(*args)
        named = dict(kwargs)
        if isinstance(named.get("device"), (str, int, torch.device)) and "cpu" not in str(named["device"]):
            named["device"] = "cpu"
        named.pop("pin_memory", None)
        return function(*args, **named)


def on_cpu() -> TorchFunctionMode:
    """Return the context for threads: it is on in the main thread alone."""
    return _OnCpu()


class _Stream:
    """A stream, or an event of one."""

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self  # also waits for nothing


def _install() -> None:
    warnings.simplefilter("ignore")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.Stream, cuda.stream = _Stream, lambda _: nullcontext()
    cuda.Event = lambda *_, **__: _Stream()
    for name in ("synchronize", "empty_cache", "set_rng_state", "manual_seed"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda._lazy_call = lambda *_, **__: None  # it formats a stack for every call that waits for CUDA, which never comes
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    # Not in the mode above, which is off in forwards that are recomputed within `Tensor.backward`.
    torch.Tensor.float = _keep_fp64(torch.Tensor.float)  # type: ignore[method-assign]
    torch.softmax = _keep_fp64(torch.softmax)
    _OnCpu().__enter__()  # type: ignore[no-untyped-call]


def _keep_fp64(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cross entropy and routers round to fp32, and gradients could not be compared to 1e-12."""

    def exact(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype != torch.float64:
            return function(tensor, *args, **kwargs)
        return tensor if function is _TO_FLOAT else function(tensor, *args, **{**kwargs, "dtype": None})

    return exact


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's leaves a tensor that is on the CPU already a tensor, which no all-to-all takes for sizes."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def _layer_norm(config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
    """Megatron's fused norms sum their gradients over a sequence that tensor parallelism splits; torch's refuses to."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def _norms(torch_norm: Any) -> None:
    torch_norm.WrappedTorchNorm.__new__ = lambda cls, *args, **kwargs: _layer_norm(*args, **kwargs)


def _final_norm(hybrid_block: Any) -> None:
    """Transformer Engine's, whatever the layers are made of."""
    hybrid_block.TENorm = _layer_norm


def _softmax(fused_softmax: Any) -> None:
    """Asked for in forwards that are recomputed within `Tensor.backward`, where the mode above is off."""
    fused_softmax.get_default_causal_mask = lambda length: torch.ones(length, length, dtype=torch.bool).triu(1)


def _expert_parts(moe_utils: Any) -> None:
    """Megatron 0.16.1 asks whether it is None, but does not define it where there is no Transformer Engine."""
    moe_utils.te_general_gemm = None


def _latent_parts(multi_latent_attention: Any) -> None:
    """Megatron 0.16.1 takes the engine for there, whose modules are then no classes."""
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


def _sharded_buffers(param_and_grad_buffer: Any) -> None:
    """Megatron-FSDP has a buffer for each type that it knows; here that of fp32 is of fp64."""
    kind, name = param_and_grad_buffer.ParamAndGradBuffer, "_init_each_parameter_group_buffers"
    source = dedent(inspect.getsource(getattr(kind, name)))
    found: dict[str, Any] = {}
    exec(source.replace("torch.float32", "torch.float64"), vars(param_and_grad_buffer), found)
    setattr(kind, name, found[name])
    param_and_grad_buffer._dtype_size = lambda dtype: dtype.itemsize


def _dispatchers(token_dispatcher: Any) -> None:
    token_dispatcher.maybe_move_tensor_to_cpu = _to_cpu


_install()
after_import(
    {
        "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer": _sharded_buffers,
        "megatron.core.fusions.fused_softmax": _softmax,
        "megatron.core.models.hybrid.hybrid_block": _final_norm,
        "megatron.core.transformer.moe.moe_utils": _expert_parts,
        "megatron.core.transformer.moe.token_dispatcher": _dispatchers,
        "megatron.core.transformer.multi_latent_attention": _latent_parts,
        "megatron.core.transformer.torch_norm": _norms,
    }
)
