"""Measures how much longer rings take than the same kernels without messages, by degree and pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from fcp_cli.profiling.workers.workload import SilentTransport
from fcp_cli.runtime.communication.transport import Transport
from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.ring_attention.attention import attention
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.exact import Case, draw
from fcp_cli.selftest.findings import Finding

_REPEATS = 6


def check(bench: Bench) -> Finding:
    """Time a sequence at each degree, with messages and with a transport that sends nothing."""
    found: dict[str, dict[str, float]] = {}
    for degree in bench.degrees:
        bench.begin(f"overlap: degree {degree}")
        with_messages, silent = (_seconds(bench, degree, carried) for carried in (bench.transport, SilentTransport()))
        found[str(degree)] = {
            name: 100.0 * (long / short - 1.0)
            for name, long, short in zip(("forward", "backward"), with_messages, silent, strict=True)
        }
    lines = tuple(
        f"degree {degree}: forward {percent['forward']:+.0f} %, backward {percent['backward']:+.0f} %"
        for degree, percent in found.items()
    )
    head = ("longer than the same kernels without messages:",) if lines else ("a single rank has no rings",)
    return Finding(name="overlap", passed=None, lines=(*head, *lines), figures={"longer_percent": found})


def _seconds(bench: Bench, degree: int, transport: Transport) -> tuple[float, float]:
    """Return median forward and backward seconds on rank 0; ranks outside the ring only wait."""
    rank = bench.world.rank
    if rank >= degree:
        (first, *_) = bench.gather([0.0, 0.0])
        return first[0], first[1]
    case = _case(bench, degree)
    layout = shard_layout(case.lengths, degree)
    rows = torch.from_numpy(layout.index(rank)).to(bench.device)
    drawn = draw(case, bench.dtype, bench.device).rows(rows)
    leaves = [tensor.detach().requires_grad_() for tensor in drawn[:3]]
    ring = Ring(layout=layout, index=rank, ranks=tuple(range(degree)), transport=transport)

    def forward() -> None:
        with torch.no_grad():
            attention(*leaves, ring=ring)

    def both() -> None:
        torch.autograd.grad(attention(*leaves, ring=ring), leaves, drawn.dout)

    once, twice = (_median(bench, work) for work in (forward, both))
    (first, *_) = bench.gather([once, max(twice - once, 1e-9)])
    return first[0], first[1]


def _median(bench: Bench, work: Callable[[], None]) -> float:
    work()
    return statistics.median(bench.stopwatch.measure_each(work, _REPEATS))


def _case(bench: Bench, degree: int) -> Case:
    """Return a sequence with the same number of tokens per rank at every degree."""
    if bench.device.type == "cpu":
        return Case(heads=4, kv_heads=2, head_size=64, lengths=((128 if bench.settings.quick else 512) * degree,))
    return Case(heads=32, kv_heads=8, head_size=128, lengths=((2048 if bench.settings.quick else 8192) * degree,))
