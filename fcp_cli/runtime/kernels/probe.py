"""Test calls of a kernel: small packs, forward and backward, compared with plain matrix products.

As in a ring's backward, the backward gets the final out and log-sum-exp of a row, which differ from those that forward
returned. A kernel that ignores them, or recomputes its own, fails.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fcp_cli.cost.kernel_names import KernelName
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.available import NamedKernel, kernels_of, unavailability
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.layouts.layout import Segments

_BOUND: Final = 2e-2  # relative L2 error of 16-bit results and gradients
_LSE_BOUND: Final = 1e-3
_LSE_SHIFT: Final = 0.25  # makes the final lse and out differ from those of forward
_OUT_FACTOR: Final = 0.5

PACKS: Final = (
    Segments((96, 96), (96, 96), causal=True),
    Segments((64,), (160,), causal=False),
    Segments((40, 130), (40, 130), causal=True),
)
"""Calls that every kernel can be asked for: own keys of equal sequences, a ring's hop, own keys of unequal ones."""


class Signature(NamedTuple):
    """Query heads, key/value heads, head sizes of queries and of values, and data type."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


GENERIC: Final = Signature(4, 2, 128, 128, torch.bfloat16)


def signature_of(q: Tensor, k: Tensor, v: Tensor) -> Signature:
    return Signature(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype)


def failure(kernel: NamedKernel, signature: Signature, device: torch.device) -> str | None:
    """Run the test calls that the kernel supports, synchronously; return the reason to reject it, or None."""
    for segments in PACKS:
        fresh = Segments(segments.q_lengths, segments.k_lengths, segments.causal)
        if kernel.refusal(fresh) is not None:
            continue
        try:
            error = _error(kernel, signature, fresh, device)
        except Exception as raised:
            if is_of_the_device(raised):
                raise
            return reason_of(raised)
        if error is not None:
            return error
    return None


def unusable(name: KernelName, signature: Signature, device: torch.device) -> str | None:
    """Return the reason why a kernel cannot run here or all its variants fail their test calls, or None."""
    reason = unavailability(name)
    if reason is not None or name == "fa2":
        return reason
    for form in kernels_of(name):
        reason = failure(form, signature, device)
        if reason is None:
            return None
    return reason


def is_of_the_device(error: Exception) -> bool:
    """Return whether an error is of memory or the device, after which no other kernel can run the call either."""
    broken = isinstance(error, (torch.OutOfMemoryError, *_accelerator_errors()))
    return broken or any(text in str(error) for text in ("CUDA error", "out of memory"))


def _accelerator_errors() -> tuple[type[Exception], ...]:
    found = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    return () if found is None else (found,)


def reason_of(error: Exception) -> str:
    """Return the first line of an error, for the end of a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]


def _error(kernel: NamedKernel, signature: Signature, segments: Segments, device: torch.device) -> str | None:
    heads, kv_heads, head_dim, value_dim, dtype = signature
    generator = torch.Generator().manual_seed(0)
    rows, keys = sum(segments.q_lengths), sum(segments.k_lengths)
    sizes = ((rows, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim), (rows, heads, value_dim))
    q, k, v, dout = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    scale = head_dim**-0.5
    exact = DenseKernel()
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, segments, scale)
        # Neither autocast nor TF32 touches fp64.
        wide = (q.double(), k.double(), v.double())
        wanted_out, wanted_lse = exact.forward(*wide, segments, scale)
        if out.shape != wanted_out.shape or lse.shape != wanted_lse.shape:
            raise RunError(f"it returns {tuple(out.shape)} and {tuple(lse.shape)} for {tuple(q.shape)}")
        final_out, final_lse = wanted_out * _OUT_FACTOR, wanted_lse + _LSE_SHIFT
        grads = kernel.backward(dout, q, k, v, final_out.to(dtype), final_lse.float(), segments, scale)
        wanted = exact.backward(dout.double(), *wide, final_out, final_lse, segments, scale)
    results = (
        ("out", out, wanted_out),
        ("log-sum-exp", lse, wanted_lse),
        *zip(("dq", "dk", "dv"), grads, wanted, strict=True),
    )
    for name, found, expected in results:
        error = float((found.double() - expected).norm() / expected.norm())
        if not error <= (_LSE_BOUND if found is lse else _BOUND):  # also true for NaN
            return f"its {name} is off by {error:.1e} in a test call"
    return None
