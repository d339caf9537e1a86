"""Selection of the attention kernel by device and data type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from fcp_cli.cost.kernel_names import VARIABLE
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.base import AttentionKernel
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel
from fcp_cli.runtime.kernels.cuda_choice import ChosenKernel, Preference, asked_kernel
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.kernels.npu import NpuKernel

_HALF = (torch.bfloat16, torch.float16)
_FLOATING = (*_HALF, torch.float32, torch.float64)


@lru_cache(maxsize=32)
def capped_kernel(device_type: str, dtype: torch.dtype, softcap: float) -> AttentionKernel:
    """Return the kernel for soft-capped scores: plain matrix products."""
    if softcap <= 0:
        raise RunError(f"attention was given softcap={softcap}; scores are capped at a number above 0")
    if device_type != "cpu" and dtype in _HALF:
        raise RunError(
            f"no attention kernel of PyTorch for {dtype} on {device_type} has soft caps on scores (softcap={softcap}); "
            "train the model on the CPU or, for short sequences, in fp32, where they are plain matrix products"
        )
    select_kernel(device_type, dtype)
    return DenseKernel(softcap)


@lru_cache(maxsize=32)
def select_kernel(device_type: str, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel for tensors of `dtype` on a device of `device_type`: "cpu", "cuda" or "npu".

    fp32 and fp64 on an accelerator run as plain matrix products (see `DenseKernel`).
    """
    if dtype not in _FLOATING:
        raise RunError(f"attention takes bf16, fp16, fp32 or fp64 tensors, not {dtype}")
    if device_type == "cpu":
        return CpuKernel()
    if device_type == "cuda":
        return _cuda_kernel() if dtype in _HALF else DenseKernel()
    if device_type == "npu":
        return NpuKernel() if dtype in _HALF else DenseKernel()
    raise RunError(f"no attention kernel for device {device_type!r}: tensors must be on cpu, cuda or npu")


_preferences: list[Preference] = []  # the last one is in force


def _cuda_kernel() -> AttentionKernel:
    """Return the kernel that dispatches over this device's kernels; without a device (a build host), PyTorch's own."""
    preference = _preferences[-1] if _preferences else Preference(asked=asked_kernel(os.environ.get(VARIABLE)))
    return ChosenKernel(preference) if torch.cuda.is_available() else CudaFlashKernel()


def prefer(preference: Preference) -> None:
    """Choose CUDA kernels of this process by `preference` from now on."""
    _preferences[:] = [preference]
    select_kernel.cache_clear()


@contextmanager
def preferring(preference: Preference) -> Iterator[None]:
    """Choose CUDA kernels by `preference` within the block."""
    before = list(_preferences)
    prefer(preference)
    try:
        yield
    finally:
        _preferences[:] = before
        select_kernel.cache_clear()
