"""Two hundred fixed steps, planned by this checkout and by another one, or without one kind of candidate.

    python -m benchmarks.held_cells --against ../other-checkout
    python -m benchmarks.held_cells --without regrouped "one degree"
    python -m benchmarks.held_cells --write table.json, then --against table.json

A cell is one set of lengths under one budget, sync and cost profile of fixed coefficients, 512 sequences on 64 ranks.
Prints change of step time by set of lengths and sync, and the worst cells: a release regresses none by more than 0.3 %.
The other checkout runs its own package in a process of its own, on lengths and profiles that it is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

_PUBLISHED = ("documents", "longalign", "azure", "mooncake", "llava-video")
_BUDGETS, _SYNCS, _RANKS, _SEQUENCES = (16_384, 8_192), ("iteration", "microbatch"), 64, 512
# Of Qwen3-8B's kind: rings dear across nodes; attention hides rings and micro-batches are cheap; recomputation as
# needed with free micro-batches and dear chunks, as the search of recipes mostly chooses for tight memory.
_PROFILES = {
    "example": (2.838e-4, 0.1, "12.0e+9", ""),
    "cheap": (1.4e-4, 0.02, "40.0e+9", ""),
    "as-needed": (
        1.4e-4,
        0.0,
        "40.0e+9",
        "  chunk_seconds_per_token: 2.0e-06\nrecipe: {recompute: as-needed}\nrecompute_levels:\n"
        "- {recompute: none, tokens: 2400}\n"
        "- {recompute: activation, tokens: 3400, seconds_per_token: 1.5e-06}\n"
        "- {recompute: selective, tokens: 16384, seconds_per_token: 4.6e-05}\n",
    ),
}
_PROFILE = """\
format: fcp-cost-profile/1
model: qwen3-8b
cluster: example-8x8
origin: assumed
coefficients:
  attention_seconds_per_token2: 6.451e-9
  linear_seconds_per_token: {}
  ring_bytes_per_token: 442368
  microbatch_seconds: {}
  ring_hop_seconds: 0.0
{}bandwidth_bytes_per_second: {{intra_node: 50.0e+9, inter_node: {}}}
"""

Result: TypeAlias = Mapping[str, float]  # seconds and bound_seconds of the step, milliseconds of planning


def cells() -> dict[str, dict[str, Any]]:
    """Return all cells by name, `lengths, profile, budget, sync`."""
    from benchmarks.real_lengths import drawn
    from benchmarks.workloads import FAMILIES, HELD_OUT

    names = (*FAMILIES, *HELD_OUT, *_PUBLISHED)
    sets = {name: drawn(name, sequences=_SEQUENCES, manifests={}) for name in names}
    found: dict[str, dict[str, Any]] = {}
    for (name, tokens), (profile, figures), budget, sync in product(sets.items(), _PROFILES.items(), _BUDGETS, _SYNCS):
        linear, fixed, network, levels = figures
        found[f"{name}, {profile}, {budget}, {sync}"] = {
            "lengths": tokens.tolist(),
            "profile": _PROFILE.format(linear, fixed, levels, network),
            "budget": budget,
            "sync": sync,
        }
    return found


def plan(cells: Mapping[str, Mapping[str, Any]], without: Sequence[str]) -> dict[str, Result]:
    """Plan cells with the package that this process imports, without candidates whose names contain a word."""
    from fcp_cli.cost.profile import parse_cost_profile
    from fcp_cli.manifest.table import LengthTable
    from fcp_cli.planning import fcp_solver
    from fcp_cli.planning.assemble import assemble
    from fcp_cli.planning.batches import BatchSettings, GlobalBatches
    from fcp_cli.planning.problem import Problem

    if without:
        every = vars(fcp_solver)["best_of"]
        vars(fcp_solver)["best_of"] = lambda candidates, *more: every(
            (one for one in candidates if not any(word in one.name for word in without)), *more
        )
    found: dict[str, Result] = {}
    for name, cell in cells.items():
        problem = Problem(
            num_ranks=_RANKS,
            ranks_per_node=8,
            tokens_per_rank=cell["budget"],
            sync=cell["sync"],
            profile=parse_cost_profile(cell["profile"], name="a held cell"),
        )
        table = LengthTable(name="a held cell", length_tokens=np.array(cell["lengths"], dtype=np.int64))
        batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table), shuffle=False))
        solver, batch = fcp_solver.make_solver(batches), batches.batch(0)
        if not found:
            solver.assign(batch)  # compiled code is loaded now
        start = time.process_time()
        step = assemble(solver.assign(batch), batch, problem)
        milliseconds = 1e3 * (time.process_time() - start)
        found[name] = {
            "seconds": step.makespan_seconds,
            "bound_seconds": step.bound_seconds,
            "milliseconds": milliseconds,
        }
    return found


def plan_in(checkout: Path, cells: Mapping[str, Mapping[str, Any]], without: Sequence[str] = ()) -> dict[str, Result]:
    """Plan cells with the package of a checkout, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "cells.json"
        given.write_text(json.dumps(cells), encoding="utf-8")
        command = [sys.executable, str(Path(__file__)), "--plan", str(given), "--without", *without]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        output = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True).stdout
    return dict(json.loads(output))


def show(before: Mapping[str, Result], after: Mapping[str, Result], worst: int) -> None:
    """Print changes of step time by set of lengths and sync, then the worst cells."""
    change = {name: 100 * (after[name]["seconds"] / before[name]["seconds"] - 1.0) for name in after}
    by_set: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in after:
        by_set[name.split(", ")[0]][name.split(", ")[-1]].append(name)
    print("| time: mean, most; gap before, after | " + " | ".join(_SYNCS) + " |\n|---|---|---|")
    for lengths, of_sync in by_set.items():
        texts = []
        for sync in _SYNCS:
            names = of_sync[sync]
            gaps = [
                np.mean([100 * (one[name]["seconds"] / one[name]["bound_seconds"] - 1.0) for name in names])
                for one in (before, after)
            ]
            changes = [change[name] for name in names]
            texts.append(f"{np.mean(changes):+.2f}, {max(changes):+.2f} %; {gaps[0]:.2f}, {gaps[1]:.2f} %")
        print(f"| {lengths} | {' | '.join(texts)} |")
    spent = [sum(one[name]["milliseconds"] for name in after) / 1e3 for one in (before, after)]
    print(
        f"\n{len(change)} cells: mean {np.mean(list(change.values())):+.3f} %, worst {max(change.values()):+.2f} %, "
        f"{sum(value > 0.3 for value in change.values())} above 0.3 %; {spent[0]:.1f} -> {spent[1]:.1f} s of planning"
    )
    for name in sorted(change, key=lambda name: -change[name])[:worst]:
        print(f"  {change[name]:+.2f} %  {name}: {before[name]['seconds']:.4f} -> {after[name]['seconds']:.4f} s")


def main() -> None:
    """Compare, store a table, or (in a process for another checkout) plan the given cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a checkout, or a table of --write")
    parser.add_argument("--write", type=Path, help="store this checkout's step times")
    parser.add_argument("--without", nargs="*", default=[], help="compare with this checkout without these candidates")
    parser.add_argument("--worst", type=int, default=5, help="cells to print")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        print(json.dumps(plan(json.loads(options.plan.read_text(encoding="utf-8")), options.without)))
        return
    here, every = Path(__file__).parents[1], cells()
    if options.against is not None and options.against.is_file():
        before = json.loads(options.against.read_text(encoding="utf-8"))
    else:
        before = plan_in(options.against or here, every)
    after = plan_in(here, every, options.without) if options.against or options.without else before
    if options.write:
        options.write.write_text(json.dumps(after), encoding="utf-8")
    show(before, after, options.worst)


if __name__ == "__main__":
    main()
