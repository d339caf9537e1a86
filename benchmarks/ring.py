"""What ring attention costs beside the kernel it is made of, on this CPU.

    python -m benchmarks.ring [--repeats N]

(a) degree 1, forward and backward through autograd, against plain scaled_dot_product_attention per sequence;
(b) the work of all members of a ring of degree 2 to 4, summed, against the unsplit kernel;
(c) host time to switch to the next micro-batch's group: its layout, its ring and the segments of every hop.

The two sides of a comparison run in turn, A B A B ..., on one thread, and processor time is compared, so that other
work on the machine does not count. A ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator
from statistics import median
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lockstep import LockstepTransport, run_lockstep
from fcp_cli.runtime.kernels import select_kernel
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import AttentionSpec, Ring
from fcp_cli.runtime.ring_attention import attention
from fcp_cli.runtime.ring_passes import ring_backward, ring_forward
from fcp_cli.runtime.transport import Handle
from fcp_cli.verification.emulation import Mailbox

Result = TypeVar("Result")

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
PACKS: dict[str, tuple[int, ...]] = {
    "one of 4096": (4096,),
    "2048 + 1500 + 548": (2048, 1500, 548),
    "2048 and 16 of 128": (2048, *(128,) * 16),
    "8 of 512": (512,) * 8,
    "32 of 128": (128,) * 32,
}
LARGEST_RATIO_DEGREE_1, LARGEST_RATIO_SPLIT, LARGEST_SWITCH_SECONDS = 1.02, 1.1, 100e-6


def main() -> None:
    parser = argparse.ArgumentParser(description="What ring attention costs beside its kernel.")
    parser.add_argument("--repeats", type=int, default=15, help="pairs of runs per ratio (default 15)")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, {repeats} pairs per ratio")
    for dtype in (torch.float32, torch.bfloat16):
        for name, lengths in PACKS.items():
            compare_degree_1(f"{name}, {dtype}", lengths, dtype, repeats)
    for name, lengths in PACKS.items():
        for degree in (2, 3, 4):
            compare_split(name, lengths, degree, repeats)
    measure_switch(repeats)


def compare_degree_1(name: str, lengths: tuple[int, ...], dtype: torch.dtype, repeats: int) -> None:
    q, k, v, grad_out = _inputs(sum(lengths), dtype)
    leaves = [tensor.transpose(0, 1).unsqueeze(0).requires_grad_() for tensor in (q, k, v)]
    grad = grad_out.transpose(0, 1).unsqueeze(0)
    ring = Ring(shard_layout(lengths, 1))

    def ours() -> None:
        torch.autograd.grad(attention(leaves[0], leaves[1], leaves[2], ring=ring), leaves, grad)

    def plain() -> None:
        torch.autograd.grad(_plain_attention(leaves[0], leaves[1], leaves[2], lengths), leaves, grad)

    _report("(a) degree 1 / SDPA", name, _timed(ours), _timed(plain), repeats, LARGEST_RATIO_DEGREE_1)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> Tensor:
    parts = zip(*(torch.split_with_sizes(tensor, lengths, dim=2) for tensor in (q, k, v)), strict=True)
    outs = [F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True) for qs, ks, vs in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def compare_split(name: str, lengths: tuple[int, ...], degree: int, repeats: int) -> None:
    """Only the members' own work is timed: handing messages over stands for a network here, and is left out."""
    whole = _inputs(sum(lengths), torch.float32)
    layout, ranks = shard_layout(lengths, degree), tuple(range(degree))
    shards = [[tensor[torch.from_numpy(layout.index(i))] for tensor in whole] for i in ranks]
    kernel, scale = select_kernel("cpu", torch.float32), HEAD_DIM**-0.5
    (own,) = shard_layout(lengths, 1).ring.hops(0, 0)

    def split() -> float:
        clock, mailbox = Stopwatch(), Mailbox()
        rings = [Ring(layout, i, ranks, Untimed(mailbox, i, clock)) for i in ranks]
        forward = run_lockstep(
            [
                clock.running(ring_forward(ring, q, k, v, AttentionSpec(scale)))
                for ring, (q, k, v, _) in zip(rings, shards, strict=True)
            ]
        )
        run_lockstep(
            [
                clock.running(ring_backward(ring, grad_out, kept, AttentionSpec(scale)))
                for ring, (_, _, _, grad_out), kept in zip(rings, shards, forward, strict=True)
            ]
        )
        return clock.seconds

    def unsplit() -> None:
        q, k, v, grad_out = whole
        out, lse = kernel.forward(q, k, v, own.segments, scale)
        kernel.backward(grad_out, q, k, v, out, lse, own.segments, scale)

    _report(f"(b) degree {degree} / unsplit", name, split, _timed(unsplit), repeats, LARGEST_RATIO_SPLIT)


class Stopwatch:
    """Seconds that the members of a ring spend on work of their own."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def running(self, member: Generator[Handle, None, Result]) -> Generator[Handle, None, Result]:
        """The same generator; the clock runs while it does, and stands while it waits."""
        while True:
            begun = time.process_time()
            try:
                handle = next(member)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            finally:
                self.seconds += time.process_time() - begun
            yield handle


class Untimed(LockstepTransport):
    """Hands messages over while the clock stands."""

    def __init__(self, mailbox: Mailbox, rank: int, clock: Stopwatch) -> None:
        super().__init__(mailbox, rank)
        self._clock = clock

    def start(self, kind: str, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> Handle:
        begun = time.process_time()
        handle = super().start(kind, send, to, receive, source)
        self._clock.seconds -= time.process_time() - begun
        return handle


def measure_switch(repeats: int) -> None:
    """Median over packs of 1 to 32 sequences and degrees of 1 to 8; a first time also makes what later layers reuse."""
    transport = LockstepTransport(Mailbox(), 0)
    packs = [
        (tuple(range(first, first + count)), degree)
        for first in range(100, 110)
        for count in (1, 4, 32)
        for degree in (1, 2, 3, 8)
    ]

    def switch(lengths: tuple[int, ...], degree: int) -> float:
        begun = time.perf_counter()
        ring = Ring(shard_layout(lengths, degree), 0, tuple(range(degree)), transport)
        for hop in range(degree):
            ring.work(hop)
        return time.perf_counter() - begun

    first, again = [], []
    for _ in range(repeats):
        shard_layout.cache_clear()
        first += [switch(*pack) for pack in packs]
        again += [switch(*pack) for pack in packs]
    for name, seconds in (("lengths not seen before", first), ("lengths seen before", again)):
        _verdict(f"(c) switch group, {name}", median(seconds) * 1e6, LARGEST_SWITCH_SECONDS * 1e6, "us")


def _inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_out = (
        torch.randn(tokens, heads, HEAD_DIM, generator=generator).to(dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return q, k, v, grad_out


def _report(
    what: str, name: str, ours: Callable[[], float], plain: Callable[[], float], repeats: int, largest_ratio: float
) -> None:
    ours(), plain()
    pairs = [(ours(), plain()) for _ in range(repeats)]
    ratio = median(ours_seconds / plain_seconds for ours_seconds, plain_seconds in pairs)
    best = min(first for first, _ in pairs) / min(second for _, second in pairs)
    _verdict(f"{what}, {name} (of best runs: {best:.3f})", ratio, largest_ratio, "x")


def _timed(run: Callable[[], None]) -> Callable[[], float]:
    """`run`, answering the seconds of processor time it took."""

    def timed() -> float:
        begun = time.process_time()
        run()
        return time.process_time() - begun

    return timed


def _verdict(what: str, value: float, limit: float, unit: str) -> None:
    print(f"{what:<84} {value:8.3f} {unit}  {'ok' if value <= limit else f'over {limit:g}'}", flush=True)


if __name__ == "__main__":
    main()
