"""Compares rings of each degree, with and without Ulysses, on mixed packs with a single device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.checks.kernel import attended
from fcp_cli.selftest.exact import Attended, Case, Drawn, draw, exact, relative, squares
from fcp_cli.selftest.findings import Finding

MOST_MULTIPLE = 2.0
"""Maximum error of a ring, as a multiple of a single device's error."""
_FLOOR = 2e-6  # smaller errors are rounding, whatever the single device's error


def check(bench: Bench) -> Finding:
    """Compare each degree up to 8, on the first and on the last ranks."""
    multiples: dict[str, float] = {}
    passed = True
    for kernel, (ranks, shared) in product(bench.kernels, list(_groups(bench))):
        sets = "" if shared == 1 else f", {shared} share heads"
        name = f"degree {len(ranks)}, ranks {ranks[0]}-{ranks[-1]}{sets}{'' if kernel is None else f', {kernel}'}"
        bench.begin(f"rings: {name}")
        with bench.running(kernel):
            error, own_error = _errors(bench, ranks, shared)
        multiples[name] = error / max(own_error, 1e-30)
        passed = passed and error <= max(MOST_MULTIPLE * own_error, _FLOOR)
    if not multiples:
        return Finding(name="rings", passed=None, lines=("a single rank has no rings",))
    worst = max(multiples, key=lambda name: multiples[name])
    return Finding(
        name="rings",
        passed=passed,
        lines=(f"degrees 2 to {bench.degrees[-1]}, worst {multiples[worst]:.2f} x one device's own error: {worst}",),
        figures={"multiple_of_own_error": multiples, "most_multiple": MOST_MULTIPLE},
    )


def _groups(bench: Bench) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (ranks, Ulysses degree) for the first and last ranks of each degree."""
    heads = _case(bench).heads
    for degree in bench.degrees:
        first, last = tuple(range(degree)), tuple(range(bench.world.size - degree, bench.world.size))
        for ranks in dict.fromkeys((first, last)):
            yield ranks, 1
        for shared in (2, 4):
            if not degree % shared and not heads % shared:
                yield first, shared


def _errors(bench: Bench, ranks: tuple[int, ...], shared: int) -> tuple[float, float]:
    """Return the relative errors of a ring and of a single device, for the same pack."""
    case = _case(bench)
    drawn = draw(case, bench.dtype, bench.device)
    wanted = exact(case, drawn)
    alone = squares(attended(drawn, Ring(layout=shard_layout(case.lengths, 1))), wanted)
    mine = [0.0, 0.0]
    if bench.world.rank in ranks:
        index = ranks.index(bench.world.rank)
        layout = shard_layout(case.lengths, len(ranks), shared)
        rows = torch.from_numpy(layout.index(index))
        own = Drawn(*drawn).rows(rows.to(bench.device))
        found = attended(own, Ring(layout=layout, index=index, ranks=ranks, transport=bench.transport))
        mine = squares(found, Attended(*(tensor.index_select(2, rows) for tensor in wanted)))
    everyone = bench.gather([*mine, *alone])
    return relative([row[:2] for row in everyone]), relative([everyone[0][2:]])


def _case(bench: Bench) -> Case:
    """Return a pack with sequences shorter than the ring and one much longer."""
    if bench.settings.quick:
        return Case(heads=4, kv_heads=2, head_size=64, lengths=(97, 1, 5, 40))
    if bench.device.type == "cpu":
        return Case(heads=4, kv_heads=2, head_size=64, lengths=(517, 1, 7, 130, 64))
    return Case(heads=8, kv_heads=2, head_size=128, lengths=(2049, 1, 7, 513, 64, 3))
