"""Times all attention kernels of a device on the shapes of plans."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Final

import torch

from fcp_cli.cost.attention_kernels import KernelTiming, shape_class
from fcp_cli.cost.kernel_names import KERNELS
from fcp_cli.profiling.workers.device import Stopwatch, wait_for_device
from fcp_cli.runtime.kernels.available import NamedKernel
from fcp_cli.runtime.kernels.cuda_choice import ChosenKernel, Preference
from fcp_cli.runtime.kernels.probe import Signature, unusable
from fcp_cli.runtime.layouts.layout import Segments

BUDGET_SECONDS: Final = 20.0
_LEAST_TOKENS, _PACK_TOKENS, _MOST_TOKENS = 256, 16_384, 131_072
_REPEATS: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Sequences of an attention call; a full mask represents a ring hop."""

    lengths: tuple[int, ...]
    causal: bool

    @property
    def pairs(self) -> float:
        """Number of query-key pairs, by which calls are ordered."""
        return sum(length * length for length in self.lengths) * (0.5 if self.causal else 1.0)

    def segments(self) -> Segments:
        return Segments(self.lengths, self.lengths, causal=self.causal)


def calls(most_tokens: int) -> list[Call]:
    """Return the calls to time, cheapest first: single sequences, equal packs and mixed packs.

    Args:
        most_tokens: maximum tokens of a call: the longest pack per rank.
    """
    most = min(most_tokens, _MOST_TOKENS)
    pack = min(_PACK_TOKENS, most)
    singles = [(length,) for length in _lengths(most)]
    equal = [(length,) * (pack // length) for length in _lengths(pack // 2)]
    mixed = [_spread(length, pack // length) for length in _lengths(pack // 2)]
    found = [Call(lengths=lengths, causal=causal) for lengths in (*singles, *equal, *mixed) for causal in (True, False)]
    return sorted(found, key=lambda call: call.pairs)


def _lengths(most: int) -> list[int]:
    lengths = [_LEAST_TOKENS]
    while lengths[-1] * 4 <= most:
        lengths.append(lengths[-1] * 4)
    return lengths


def _spread(mean: int, count: int) -> tuple[int, ...]:
    """Return lengths spread between 0.5 and 1.5 times the mean."""
    return tuple(mean // 2 + i * mean // max(1, count - 1) for i in range(count))


def time_kernels(
    device: torch.device, signature: Signature, most_tokens: int, *, budget_seconds: float = BUDGET_SECONDS
) -> list[KernelTiming]:
    """Return timings of all usable kernels, within budget and memory."""
    kernels = [ChosenKernel(Preference(asked=name)) for name in KERNELS if unusable(name, signature, device) is None]
    stopwatch, deadline = Stopwatch(device), time.monotonic() + budget_seconds
    found: list[KernelTiming] = []
    for call in calls(most_tokens):
        for chosen in kernels:
            if time.monotonic() > deadline:
                return found
            kernel = chosen.of(signature, call.segments(), device)
            if kernel.name == chosen.preference.asked:
                timing = _timing(kernel, call, signature, stopwatch, device)
                if timing is None:
                    return found
                found.append(timing)
    return found


def _timing(
    kernel: NamedKernel, call: Call, signature: Signature, stopwatch: Stopwatch, device: torch.device
) -> KernelTiming | None:
    """Return the timing of a call, or None if it runs out of memory."""
    try:
        return _timed(kernel, call, signature, stopwatch, device)
    except torch.OutOfMemoryError:
        return None


def _timed(
    kernel: NamedKernel, call: Call, signature: Signature, stopwatch: Stopwatch, device: torch.device
) -> KernelTiming:
    heads, kv_heads, head_dim, value_dim, dtype = signature
    tokens, segments, scale = sum(call.lengths), call.segments(), head_dim**-0.5
    sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))
    q, k, v, dout = (torch.randn(tokens, *size, device=device, dtype=dtype) for size in sizes)

    def forward() -> None:
        kernel.forward(q, k, v, segments, scale)

    def backward() -> None:
        kernel.backward(dout, q, k, v, out, lse, segments, scale)

    with torch.no_grad():
        wait_for_device(device)
        began = time.perf_counter()
        out, lse = kernel.forward(q, k, v, segments, scale)
        backward()
        wait_for_device(device)
        first = time.perf_counter() - began
        forward_seconds, backward_seconds = (
            statistics.median(stopwatch.measure_each(work, _REPEATS)) for work in (forward, backward)
        )
    shape = shape_class(call.lengths, causal=call.causal)
    return KernelTiming(
        kernel=kernel.name,
        mask=shape.mask,
        pack=shape.pack,
        tokens=shape.tokens,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        first_seconds=max(0.0, first - forward_seconds - backward_seconds),
    )
