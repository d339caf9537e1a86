"""Selection of the attention kernel by device and data type."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from fcp_cli.cost.kernels import KernelTable, default_order, pays_for_graphs, shape_class
from fcp_cli.cost.recipe import KERNEL_VARIABLE, KERNELS, KernelName
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels.available import (
    NamedKernel,
    UnavailableError,
    is_rocm,
    kernels_of,
    major_capability,
    unavailability,
)
from fcp_cli.runtime.kernels.base import AttentionKernel
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel
from fcp_cli.runtime.kernels.cudnn import MOST_BATCHES, least_unmeasured_tokens
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.layout import Segments

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
    preference = _preferences[-1] if _preferences else Preference(asked=asked_kernel(os.environ.get(KERNEL_VARIABLE)))
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


# Choice of a CUDA kernel per call: the best for the call's shape class that supports it.
#
# The order is: the requested kernel; kernels measured on the call's shape class, fastest first; the default order of
# the architecture. A kernel is used only after its test call has passed for these heads and data type. The choice
# only needs values on the host, so it never waits, and a layout keeps it for all layers.
#
# A pack of unequal sequences may be split. Its long sequences run on cuDNN, the fastest on Hopper, whose packed form
# is not used up to torch 2.13. Runs of the others between them use the pack's kernel. Sequences do not attend to each
# other, so results are concatenated.
#
# Kernels compute the same function up to rounding, with natural log-sum-exps, so calls of one row and ranks of one
# ring may use different kernels.

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Settings of the kernel choice.

    Attributes:
        asked: kernel to prefer for every call that it supports, or None.
        table: measured kernels of this device, or None.
        excluded: kernels that some rank cannot run.
        report: receives a line when a kernel is dropped during a run, or None.
    """

    asked: KernelName | None = None
    table: KernelTable | None = None
    excluded: frozenset[KernelName] = frozenset()
    report: Callable[[str], None] | None = field(default=None, compare=False)

    def order(self, segments: Segments) -> tuple[KernelName, ...]:
        """Return the kernels to try for a call, each once."""
        default = default_order(major_capability(), rocm=is_rocm())[0]
        measured: tuple[KernelName, ...] = ()
        if self.table is not None:
            measured = self.table.order(shape_class(segments.q_lengths, causal=segments.causal))
        if not measured:
            least, pairs = least_unmeasured_tokens(), zip(segments.q_lengths, segments.k_lengths, strict=True)
            if not all(pays_for_graphs(*pair, causal=segments.causal, tokens=least) for pair in pairs):
                # cuDNN last: building its graph for a new shape would take longer than it saves.
                default = tuple(sorted(default, key=lambda name: name == "cudnn"))
        asked = () if self.asked is None else (self.asked,)
        names = dict.fromkeys((*asked, *measured, *default, "fa2"))
        return tuple(name for name in names if name not in self.excluded)

    def favours(self, name: KernelName, other: KernelName, one: Segments) -> bool:
        """Return whether a single sequence would prefer kernel `name` to `other`, ignoring a requested kernel."""
        order = replace(self, asked=None).order(one)
        return name in order and order.index(name) < (order.index(other) if other in order else len(order))


class ChosenKernel:
    """CUDA attention for 16-bit types that dispatches every call to the kernel chosen for it."""

    packed = True

    def __init__(self, preference: Preference) -> None:
        self.preference = preference
        self._passed: dict[tuple[KernelName, Signature], NamedKernel | None] = {}
        self._dropped: set[KernelName] = set()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        return self._run(q, k, v, segments, lambda kernel: kernel.forward(q, k, v, segments, scale))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._run(q, k, v, segments, lambda kernel: kernel.backward(dout, q, k, v, out, lse, segments, scale))

    def of(self, signature: Signature, segments: Segments, device: torch.device) -> NamedKernel:
        """Return the kernel of a call."""
        key = (self, signature, len(self._dropped))  # layouts outlive changes of the preference and dropped kernels
        return segments.derived(key, lambda: self._choose(signature, segments, device))

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, call: Callable[[NamedKernel], Result]
    ) -> Result:
        signature = signature_of(q, k, v)
        while True:
            kernel = self.of(signature, segments, q.device)
            try:
                return call(kernel)
            except Exception as error:
                # PyTorch's own kernel is the last fallback, so its errors are raised to the user.
                if kernel.name == "fa2" or is_of_the_device(error):
                    raise
                self._drop(kernel.name, error)

    def _choose(self, signature: Signature, segments: Segments, device: torch.device) -> NamedKernel:
        names = [name for name in self.preference.order(segments) if name not in self._dropped]
        for name in names:
            if all(form.refusal(segments) is not None for form in _forms(name)):
                continue
            kernel = self._tested(name, signature, device)
            if kernel is not None and kernel.refusal(segments) is None:
                return self._split(kernel, signature, segments, device) or kernel
        raise RunError(
            f"no attention kernel of {', '.join(names) or 'this device'} takes {signature.heads} heads of "
            f"{signature.head_dim} in {signature.dtype}; train the model in fp32, or on the CPU"
        )

    def _split(
        self, rest: NamedKernel, signature: Signature, segments: Segments, device: torch.device
    ) -> NamedKernel | None:
        """Return a kernel that runs a pack's long sequences on cuDNN and the others on `rest`, or None if none is long.

        A sequence is long if cuDNN is preferred for it alone: by the measured table, else by the default order.
        """
        name: KernelName = "cudnn"
        lengths = list(zip(segments.q_lengths, segments.k_lengths, strict=True))
        if rest.name == name or name in self._dropped or segments.window is not None or len(set(lengths)) == 1:
            return None
        if self.preference.asked not in (None, name):
            return None
        alone = {pair: Segments((pair[0],), (pair[1],), causal=segments.causal) for pair in lengths}
        favoured = {pair for pair, one in alone.items() if self.preference.favours(name, rest.name, one)}
        cudnn = self._tested(name, signature, device) if favoured else None
        if cudnn is None:
            return None
        long = [at for at, pair in enumerate(lengths) if pair in favoured and cudnn.refusal(alone[pair]) is None]
        long = sorted(long, key=lambda at: -lengths[at][0])[:MOST_BATCHES]
        kernels = [cudnn if at in long else rest for at in range(len(lengths))]
        return SplitKernel(name, runs_of(segments, kernels)) if long else None

    def _tested(self, name: KernelName, signature: Signature, device: torch.device) -> NamedKernel | None:
        """Return the first variant of a kernel that passes its test calls, or None; FlashAttention 2 is not tested."""
        key = (name, signature)
        if key not in self._passed:
            passing = (one for one in _forms(name) if name == "fa2" or not failure(one, signature, device))
            self._passed[key] = next(passing, None)
        return self._passed[key]

    def _drop(self, name: KernelName, error: Exception) -> None:
        self._dropped.add(name)
        if self.preference.report is not None:
            self.preference.report(
                f"warning: attention kernel {name} failed and is not used any more: {reason_of(error)}"
            )


_SPARED: Final = 8  # as MagiAttention reserves (4 to 8, docs/main/blog/kernel_overlap.html): one per message channel


class SparingKernel:
    """A kernel that leaves multiprocessors to the messages beside it, if it is persistent.

    FlashAttention 3 fills the device until it ends, and a message's blocks, of whatever priority, then wait for it.
    PyTorch hands its carve-out on to it (`sm_margin`). Matrix products heed it, too, so only these calls set it.
    """

    packed = True

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        with _carve_out():
            return self._kernel.forward(q, k, v, segments, scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _carve_out():
            return self._kernel.backward(dout, q, k, v, out, lse, segments, scale)


@contextmanager
def _carve_out() -> Iterator[None]:
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(_SPARED if before is None else before)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


class KernelRun(NamedTuple):
    """Consecutive sequences of a call, and their kernel."""

    kernel: NamedKernel
    segments: Segments


def runs_of(segments: Segments, kernels: Sequence[NamedKernel]) -> list[KernelRun]:
    """Return the runs of a call.

    Args:
        segments: the call; without a window.
        kernels: kernel of each sequence.
    """
    runs, start = [], 0
    for kernel, group in groupby(kernels):
        stop = start + len(list(group))
        lengths = segments.q_lengths[start:stop], segments.k_lengths[start:stop]
        runs.append(KernelRun(kernel, Segments(*lengths, causal=segments.causal)))
        start = stop
    return runs


class SplitKernel:
    """The kernels of one call's runs, as a kernel for this call only. It never synchronizes with the device.

    Args:
        name: kernel of the long sequences, which is dropped if a run fails.
        runs: runs of the call.
    """

    packed = True

    def __init__(self, name: KernelName, runs: list[KernelRun]) -> None:
        self.name = name
        self._runs = runs

    def refusal(self, segments: Segments) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        parts = zip(self._runs, self._cut((q,), (k, v)), strict=True)
        results = [
            run.kernel.forward(queries, keys, values, run.segments, scale) for run, (queries, keys, values) in parts
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(self._runs, self._cut((dout, q, out, lse), (k, v)), strict=True)
        results = [
            run.kernel.backward(douts, queries, keys, values, outs, lses, run.segments, scale)
            for run, (douts, queries, outs, lses, keys, values) in parts
        ]
        dq, dk, dv = (torch.cat(grads) for grads in zip(*results, strict=True))
        return dq, dk, dv

    def _cut(self, of_rows: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Yield views of packed tensors per run: first of query-side tensors, then of key-side tensors."""
        rows = [sum(run.segments.q_lengths) for run in self._runs]
        keys = [sum(run.segments.k_lengths) for run in self._runs]
        sides = ((of_rows, rows), (of_keys, keys))
        return zip(*(torch.split_with_sizes(one, sizes) for tensors, sizes in sides for one in tensors), strict=True)


def _forms(name: KernelName) -> tuple[NamedKernel, ...]:
    """Return the variants of a kernel; empty if it cannot run here."""
    try:
        return kernels_of(name)
    except UnavailableError:
        return ()


def asked_kernel(value: str | None) -> KernelName | None:
    """Return the kernel requested by the environment, or None for auto."""
    if value in (None, "", "auto"):
        return None
    for name in KERNELS:
        if value == name:
            return name
    raise RunError(f"{KERNEL_VARIABLE} is {value!r}; it must be auto, {', '.join(KERNELS)}")


# Test calls of a kernel: small packs, forward and backward, compared with plain matrix products.
#
# As in a ring's backward, the backward gets the final out and log-sum-exp of a row, which differ from those that
# forward returned. A kernel that ignores them, or recomputes its own, fails.

_BOUND: Final = 2e-2  # relative L2 error of 16-bit results and gradients
_LSE_BOUND: Final = 1e-3
_LSE_SHIFT: Final = 0.25  # makes the final lse and out differ from those of forward
_OUT_FACTOR: Final = 0.5

PACKS: Final = (
    Segments((96, 96), (96, 96), causal=True),
    Segments((64,), (160,), causal=False),
    Segments((40, 57, 130), (40, 57, 130), causal=True),
    Segments((50,), (150,), causal=False),
)
"""Calls that every kernel can be asked for: own keys of equal sequences, a ring's hop, own keys of unequal ones.

Both hops, and 40 and 57 tokens, are rounded to the same powers of two, by which cuDNN may share graphs between lengths.
"""


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
    q, k, v, dout = (torch.randn(size, generator=generator, device="cpu").to(device, dtype) for size in sizes)
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
