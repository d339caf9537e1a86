"""Compares each device's attention kernels with the fp64 formula."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from fcp_cli.cost.kernel_names import KernelName
from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.ring_attention.attention import attention
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.exact import BOUNDS, Attended, Case, Drawn, draw, exact, relative, squares
from fcp_cli.selftest.findings import Finding


def check(bench: Bench) -> Finding:
    """Compare each attention kernel with fp64 for several shapes, on each device.

    Shapes cover grouped heads, head sizes, length 1, and many segments. If a kernel does not support a shape, its
    fallback is compared.
    """
    errors: dict[str, float] = {}
    every = [(kernel, case) for kernel in bench.kernels for case in cases(quick=bench.settings.quick)]
    for start in range(0, len(every), bench.sharers):
        batch = every[start : start + bench.sharers]
        names = [case.describe() if kernel is None else f"{kernel}, {case.describe()}" for kernel, case in batch]
        bench.begin(f"kernel: {'; '.join(names)}")
        found = [0.0] * len(names)
        mine = bench.world.rank % bench.sharers  # ranks on the same host divide the cases
        if mine < len(names):
            found[mine] = _error(bench, *every[start + mine])
        errors |= dict(zip(names, map(max, zip(*bench.gather(found), strict=True)), strict=True))
    worst = max(errors, key=lambda name: errors[name])
    bound = BOUNDS[bench.dtype]
    kernels = [name for name in bench.kernels if name is not None]
    compared = f" on {', '.join(kernels)}" if kernels else ""
    return Finding(
        name="kernel",
        passed=all(error <= bound for error in errors.values()),
        lines=(
            f"{len(errors)} cases{compared} against fp64, worst error {errors[worst]:.1e} of {bound:.0e} allowed: "
            f"{worst}",
            *(f"not {name}: {reason}" for name, reason in bench.unavailable.items()),
        ),
        figures={"bound": bound, "relative_error_by_case": errors, "unavailable_kernels": bench.unavailable},
    )


def _error(bench: Bench, kernel: KernelName | None, case: Case) -> float:
    drawn = draw(case, bench.dtype, bench.device)
    with bench.running(kernel):
        found = attended(drawn, Ring(layout=shard_layout(case.lengths, 1)))
    return relative([squares(found, exact(case, drawn))])


def cases(*, quick: bool) -> list[Case]:
    """Return the calls to compare."""
    segments = tuple(random.Random(0).randint(1, 6 if quick else 24) for _ in range(500))
    long = 96 if quick else 1024
    shapes = [(4, 4, 64), (4, 1, 128), (4, 2, 192), (2, 2, 256)] if quick else _SHAPES
    return [
        *(Case(heads=h, kv_heads=g, head_size=d, lengths=(long, 1, long // 3)) for h, g, d in shapes),
        Case(heads=4, kv_heads=2, head_size=64, lengths=(1,)),
        Case(heads=2, kv_heads=1, head_size=64, lengths=segments),
    ]


_SHAPES = [(32, 32, 64), (32, 8, 64), (16, 4, 96), (32, 8, 128), (16, 1, 128), (8, 4, 192), (8, 2, 256)]


def attended(drawn: Drawn, ring: Ring) -> Attended:
    """Run the runtime's attention forward and backward on this rank's rows."""
    leaves = [tensor.detach().requires_grad_() for tensor in drawn[:3]]
    out = attention(*leaves, ring=ring)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(out, leaves, drawn.dout)
    return Attended(out.detach(), *gradients)
