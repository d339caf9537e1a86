"""Rates of a CPU rank: matrices, attention and elementwise operations, with a process on every core.

A rank has one thread, and the ranks share caches and memory bandwidth, so every core measures at once. The figures of
the cluster `this-machine` are rounded from this output on one machine; `fcp profile` measures yours.

    python -m benchmarks.cpu_ranks
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from fcp_cli.util.machine import usable_cores

TOKENS = 2048
WIDTHS = (128, 256, 768, 1024)
HEAD_SIZES = (32, 64, 128)
LENGTHS = (256, 512, 1024)
ELEMENTS = (256 * 1024, 1024 * 1024, 4 * 1024 * 1024)


def seconds(call: Callable[[], object], *, repeats: int = 9) -> float:
    """Return the median seconds of a call after a first one."""
    call()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return median(found)


def matrix_rate(width: int) -> float:
    """Return FLOP/s of a square layer of `width`, forward and backward."""
    tokens = torch.randn(TOKENS, width, requires_grad=True)
    weight = torch.randn(width, width, requires_grad=True)
    gradient = torch.randn(TOKENS, width)

    def call() -> None:
        linear(tokens, weight).backward(gradient)  # type: ignore[no-untyped-call]

    return 6 * TOKENS * width**2 / seconds(call)


def attention_rate(head_size: int, length: int) -> float:
    """Return FLOP/s of causal attention on 4 heads, forward and backward."""
    query, key, value = (torch.randn(1, 4, length, head_size, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, 4, length, head_size)

    def call() -> None:
        scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)  # type: ignore[no-untyped-call]

    return 3.5 * 4 * 2 * head_size * length**2 / seconds(call)


def elementwise_rate(elements: int) -> float:
    """Return bytes/s read and written by products of fp32 tensors."""
    first, second = torch.randn(elements), torch.randn(elements)
    return 12 * elements / seconds(lambda: first * second)


def measure(_: None) -> list[str]:
    """Measure all rates on one thread."""
    torch.set_num_threads(1)
    lines = [f"matrices of width {width}: {matrix_rate(width) / 1e9:.1f} GFLOP/s" for width in WIDTHS]
    for size in HEAD_SIZES:
        rates = " ".join(f"{attention_rate(size, length) / 1e9:.1f}" for length in LENGTHS)
        lines.append(f"attention on heads of {size}, {LENGTHS} tokens: {rates} GFLOP/s")
    lines += [f"products of {count:,} elements: {elementwise_rate(count) / 1e9:.1f} GB/s" for count in ELEMENTS]
    return lines


def main() -> None:
    cores = usable_cores()
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        found = pool.map(measure, [None] * cores, chunksize=1)
    for lines in zip(*found, strict=True):
        print(" | ".join(lines))


if __name__ == "__main__":
    main()
