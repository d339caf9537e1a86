"""Processor time of attention on groups of u x r gloo ranks, measured, and as the cost model predicts it.

    torchrun --nproc-per-node 4 -m benchmarks.shared_heads [--repeats N]

Each group runs the forward and backward of one attention layer (8 query and 2 key/value heads of 64, fp32) over one
sequence, each rank on one thread. Coefficients are fitted on one rank, rings of 2 and 3, and sets of 2 and 4, at two
lengths; all else is predicted: other lengths, rings of 4, and 2 x 2. Sets of 4 hold two copies of each key/value head.
Processor time is compared, the median of several runs and the mean over a group's ranks, so that other work on the
machine does not count. On such ranks nothing hides messages: the cost model with an exposed share of 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from fcp_cli.arrays import FloatArray
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring, attention
from fcp_cli.runtime.transport import ProcessTransport, Transport

HEADS, KV_HEADS, HEAD_DIM, ELEMENT_BYTES = 8, 2, 64, 4
FITTED_LENGTHS, LENGTHS = (768, 1536), (768, 1024, 1536, 2048)


class Point(NamedTuple):
    """One sequence on a group of u x r ranks."""

    tokens: int
    heads_degree: int
    ring_degree: int

    @property
    def degree(self) -> int:
        return self.heads_degree * self.ring_degree

    @property
    def is_fitted(self) -> bool:
        shapes = ((1, 1), (1, 2), (1, 3), (2, 1), (4, 1))
        return self.tokens in FITTED_LENGTHS and (self.heads_degree, self.ring_degree) in shapes


POINTS = [Point(tokens, u, r) for tokens in LENGTHS for u in (1, 2, 4) for r in (1, 2, 3, 4) if u * r <= 4]


def terms(points: Sequence[Point]) -> FloatArray:
    """Return [points, terms] what the cost model's coefficients are multiplied with: its seconds are linear in them."""
    tokens, u, r = np.array([(point.tokens, point.heads_degree, point.ring_degree) for point in points], dtype=float).T
    d, one = u * r, np.ones(len(points))
    q = 4 * HEADS * HEAD_DIM * ELEMENT_BYTES  # and out, and their gradients
    kv = 4 * KV_HEADS * HEAD_DIM * ELEMENT_BYTES * np.maximum(1.0, u / KV_HEADS)  # and theirs; replicated
    # Around the ring keys and values travel twice, their gradients once.
    moved = (q + kv) * tokens / d * (u - 1) / u + 1.5 * kv * tokens * (r - 1) / d
    return np.stack([tokens**2 / d, tokens / d, one, r - 1, tokens * (r - 1) / d, u - 1, moved], axis=1)


def fitted(points: Sequence[Point], measured: FloatArray) -> FloatArray:
    """Return the coefficients, none negative, with the least squares of relative errors."""
    from scipy.optimize import nnls

    coefficients: FloatArray = nnls(terms(points) / measured[:, None], np.ones(len(points)))[0]
    return coefficients


def measure(point: Point, transport: Transport, repeats: int) -> float:
    """Return the median processor seconds of this rank in forward and backward; 0 outside of the group."""
    rank, ranks = dist.get_rank(), tuple(range(point.degree))
    if rank not in ranks:
        return 0.0
    layout = shard_layout((point.tokens,), point.degree, point.heads_degree)
    q, k, v, grad_out = (
        torch.randn(1, heads, layout.tokens(rank), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    seconds = []
    for _ in range(repeats + 1):  # the first makes what all layers share
        begun = time.process_time()
        out = attention(q, k, v, ring=Ring(layout, rank, ranks, transport))
        torch.autograd.grad(out, leaves, grad_out)
        seconds.append(time.process_time() - begun)
    return median(seconds[1:])


def main() -> None:
    """Measure all points, fit some, and print all."""
    parser = argparse.ArgumentParser(description="Attention on u x r gloo ranks, measured and predicted.")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each point (default %(default)s)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = ProcessTransport.create(torch.device("cpu"))
    measured = []
    for point in POINTS:
        seconds = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        seconds[dist.get_rank()] = measure(point, transport, repeats)
        dist.all_reduce(seconds)
        measured.append(fmean(seconds[: point.degree].tolist()))
    if dist.get_rank() == 0:
        report(np.array(measured))
    dist.destroy_process_group()


def report(measured: FloatArray) -> None:
    """Print what was measured and predicted, and the largest error of what was not fitted, per kind of group."""
    chosen = [number for number, point in enumerate(POINTS) if point.is_fitted]
    predicted = terms(POINTS) @ fitted([POINTS[number] for number in chosen], measured[chosen])
    errors = predicted / measured - 1.0
    print(f"{'tokens':>6} {'u x r':>6} {'measured ms':>12} {'predicted ms':>13} {'error':>8}")
    for point, taken, said, error in zip(POINTS, measured * 1e3, predicted * 1e3, errors, strict=True):
        mark = " fitted" if point.is_fitted else ""
        shape = f"{point.heads_degree} x {point.ring_degree}"
        print(f"{point.tokens:6} {shape:>6} {taken:12.2f} {said:13.2f} {error:8.1%}{mark}")
    for name, shares in (("rings", False), ("groups that share heads", True)):
        worst = max(
            abs(error)
            for point, error in zip(POINTS, errors, strict=True)
            if not point.is_fitted and (point.heads_degree > 1) == shares and point.degree > 1
        )
        print(f"{name}: off by {worst:.1%} at most")


if __name__ == "__main__":
    main()
