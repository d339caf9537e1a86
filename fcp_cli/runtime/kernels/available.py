"""Attention kernels that a CUDA device and this PyTorch release can run, by name.

FlashAttention 3 and 4 are separate packages, which PyTorch 2.13 adapts to the signature of its flash operators; for
older releases `flash_packages` does. PyTorch's registry (`torch.nn.attention`) replaces the operators with its adapters
for the whole process. fcp calls the adapters directly, so that the operators stay unchanged. If the script has
activated an implementation in the registry, it stays active and the flash operators run it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.attention

from fcp_cli.cost.recipe import KernelName
from fcp_cli.runtime.kernels.base import AttentionKernel
from fcp_cli.runtime.kernels.cuda import ATEN, CudaFlashKernel, FlashOperators
from fcp_cli.runtime.kernels.cudnn import CudnnKernel, aten_operators, packs_soundly, share_graphs
from fcp_cli.runtime.kernels.flash_packages import flash_3, flash_4
from fcp_cli.runtime.layout import Segments


class NamedKernel(AttentionKernel, Protocol):
    """Kernel with a name and a check for unsupported calls."""

    @property
    def name(self) -> KernelName: ...

    def refusal(self, segments: Segments) -> str | None: ...


class UnavailableError(Exception):
    """A kernel cannot run here; the message is the reason, as a clause."""


class _Adapter(NamedTuple):
    """PyTorch's adapter of a package: its module, the function that imports the package, and the two operators.

    `direct` returns the operators where PyTorch has no such module.
    """

    package: str
    install: str
    majors: tuple[int, ...]
    module: str
    load: str
    forward: str
    backward: str
    direct: Callable[[], FlashOperators]


_ADAPTERS: Final = {
    "fa3": _Adapter(
        package="flash_attn_interface",
        install="flash-attn-3",
        majors=(9,),
        module="torch.nn.attention._fa3",
        load="_fa3_import_module",
        forward="_fa3_flash_attention_forward_impl_default",
        backward="_fa3_flash_attention_backward_impl",
        direct=flash_3,
    ),
    "fa4": _Adapter(
        package="flash_attn.cute.interface",
        install="flash-attn-4",
        majors=(9, 10),
        module="torch.nn.attention._fa4",
        load="_fa4_import_module",
        forward="_fa4_flash_attention_forward_impl",
        backward="_fa4_flash_attention_backward_impl",
        direct=flash_4,
    ),
}
_FA4_PATH: Final = "_FA4_MODULE_PATH"  # the adapter looks up the package here at each call
_LEAST_CUDNN_MAJOR: Final = 8


def major_capability() -> int:
    """Return the major compute capability of the current device; 0 without a device."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def is_rocm() -> bool:
    return torch.version.hip is not None


@cache
def kernels_of(name: KernelName) -> tuple[NamedKernel, ...]:
    """Return the variants of a kernel, the preferred one first; raise UnavailableError if it cannot run here."""
    if name == "fa2":
        active = _active_implementation()
        if active is not None:
            raise UnavailableError(f"the script has activated {active} in its place")
        return (CudaFlashKernel(),)
    if is_rocm():
        raise UnavailableError("ROCm has no such kernel")
    if name == "cudnn":
        return _cudnn_forms()
    return (CudaFlashKernel(name, _adapted(name)),)


def unavailability(name: KernelName) -> str | None:
    """Return the reason why a kernel cannot run here, or None."""
    try:
        kernels_of(name)
    except UnavailableError as error:
        return str(error)
    return None


def _cudnn_forms() -> tuple[NamedKernel, ...]:
    operators = aten_operators()
    if operators is None or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        raise UnavailableError(f"torch {torch.__version__} has no attention of cuDNN")
    if major_capability() < _LEAST_CUDNN_MAJOR:
        raise UnavailableError(f"it needs compute capability {_LEAST_CUDNN_MAJOR}.0")
    if torch.are_deterministic_algorithms_enabled():
        raise UnavailableError("its backward is not deterministic, and the script asks for deterministic algorithms")
    share_graphs(operators)
    forms = (CudnnKernel(operators, packs=True),) if packs_soundly(operators) else ()
    return (*forms, CudnnKernel(operators))


def _active_implementation() -> str | None:
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    active: str | None = current()
    return active


def _adapted(name: KernelName) -> FlashOperators:
    """Return the operators of FlashAttention 3 or 4, without changing the process's own."""
    adapter = _ADAPTERS[name]
    if major_capability() not in adapter.majors:
        wanted = " or ".join(f"{major}.x" for major in adapter.majors)
        raise UnavailableError(f"it needs a device of compute capability {wanted}")
    active = _active_implementation()
    if active == name.upper():
        return ATEN
    if active is not None:
        raise UnavailableError(f"the script has activated {active} in its place")
    if not _is_installed(adapter.package):
        raise UnavailableError(f"the package {adapter.install} is not installed")
    try:
        if not _is_installed(adapter.module):
            return adapter.direct()
        module: Any = importlib.import_module(adapter.module)
        getattr(module, adapter.load)(adapter.package)
        if name == "fa4":
            setattr(module, _FA4_PATH, adapter.package)
        return FlashOperators(forward=getattr(module, adapter.forward), backward=getattr(module, adapter.backward))
    except Exception as error:  # releases fail in different ways
        raise UnavailableError(f"{adapter.install} does not fit torch {torch.__version__}: {error}") from error


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
