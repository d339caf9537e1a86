"""Hashes of plans, one line a case, to prove that a change of the planner's code changes none of its plans.

    python -m benchmarks.plan_hashes > before.txt
    python -m benchmarks.plan_hashes --against before.txt

A line names the case, hashes ranks, waves, sequences and heads degrees, and hashes the predicted seconds in every bit.
`--against` prints the lines that differ and exits with status 1. Seconds are compared on one machine and one release of
numba alone: the last bit depends on both. `--full` plans the families at the size of `benchmarks.compare_families`.
flexsp is missing, since the time limits of its integer programs make its answers depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.split_heads import long_lengths, profile_of
from benchmarks.workloads import FAMILIES, HELD_OUT, example_profile, family_table, lengths
from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import PlanError, UsageError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.online import StreamPlanner, stream_batching, stream_metadata
from fcp_cli.planning.pipelines import pipeline_of
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver, solver_names, works_under

SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")
BUDGETS, SEEDS = (16_384, 8_192), range(3)

Case = tuple[str, Iterable[StepPlan] | str]  # its name, and the plan's steps or why there are none


def families(ranks: int, sequences: int) -> Iterator[Case]:
    """Every strategy on the families of `benchmarks.compare_families`."""
    names = [name for name in solver_names() if works_under(name, example_profile()) and name != "flexsp"]
    for budget, sync, family, seed in product(BUDGETS, SYNCS, FAMILIES, SEEDS):
        table = family_table(family, sequences=sequences, seed=seed)
        problem = _problem(ranks, budget, sync)
        for name in names if seed == 0 else ["fcp"]:
            yield f"families {name} {family} {seed} {sync} {budget}", _planned(table, problem, name)


def shapes() -> Iterator[Case]:
    """The other shapes of lengths, ranks that fill no whole node, padding, and steps small enough for exact search."""
    for sync, family in product(SYNCS, HELD_OUT):
        table = family_table(family, sequences=96, seed=0)
        yield f"shapes {family} {sync}", _planned(table, _problem(16, 16_384, sync))
    table = family_table("github", sequences=96, seed=1)
    for sync in SYNCS:
        yield f"shapes broken-node {sync}", _planned(table, _problem(13, 16_384, sync))
        yield f"shapes padded {sync}", _planned(table, _problem(16, 16_384, sync, padding_multiple=256))
        for seed in SEEDS:
            tiny = family_table("github", sequences=7, seed=seed)
            yield f"shapes tiny {seed} {sync}", _planned(tiny, _problem(4, 32_768, sync))


def limits() -> Iterator[Case]:
    """Plans under limits of degrees, groups and peers."""
    table = family_table("github", sequences=96, seed=0)
    short = replace(table, length_tokens=np.minimum(table.length_tokens, 16_384))
    given: dict[str, dict[str, Any]] = {
        "max-degree-1": {"max_degree": 1},
        "max-groups-2": {"max_groups": 2},
        "max-peers-4": {"max_peers": 4},
    }
    for sync, (name, options) in product(SYNCS, given.items()):
        fitting = short if name == "max-degree-1" else table
        yield f"limits {name} {sync}", _planned(fitting, _problem(16, 16_384, sync), **options)


def pipelines() -> Iterator[Case]:
    """Ranks that are pipelines of several stages, and of several blocks of layers on each."""
    for cut, family in product(("2x1", "4x1", "4x2"), ("github", "extreme")):
        stages, virtual = map(int, cut.split("x"))
        for sync in SYNCS if virtual == 1 else SYNCS[1:]:
            shape = JobRanks(num_ranks=16, ranks_per_node=8, pipeline_parallel=stages, virtual_stages=virtual)
            problem = _problem(
                16,
                16_384,
                sync,
                pipeline_parallel=stages,
                pipeline=pipeline_of(example_profile(), shape, None),
            )
            table = family_table(family, sequences=96, seed=0)
            yield f"pipelines {cut} {family} {sync}", _planned(table, problem)


def shared_heads() -> Iterator[Case]:
    """Groups that split heads beside rings or in place of them, and the strategies that do."""
    profile = profile_of("qwen3-8b", "h100-8x8")
    kinds = {16: lengths("github", sequences=96, seed=0).tolist(), 64: long_lengths(16_384, 131_072)}
    names = [("fcp", "2d"), ("fcp", "ulysses"), ("usp", "2d"), ("deepspeed-ulysses", "ulysses")]
    for sync, (ranks, drawn), (name, attention) in product(SYNCS, kinds.items(), names):
        problem = _problem(ranks, 16_384, sync, profile=profile, attention=attention)
        table = LengthTable(name="lengths", length_tokens=np.array(drawn, dtype=np.int64))
        yield f"heads {name} {attention} {ranks} {sync}", _planned(table, problem, name)


def speeds() -> Iterator[Case]:
    """Ranks of different speeds."""
    slow = {"one": {3: 0.7}, "node": dict.fromkeys(range(8), 0.8), "two": {2: 0.5, 11: 0.9}}
    for sync, (name, of_rank), family in product(SYNCS, slow.items(), ("github", "extreme")):
        problem = _problem(16, 16_384, sync, rank_speeds=tuple(of_rank.get(rank, 1.0) for rank in range(16)))
        table = family_table(family, sequences=96, seed=0)
        yield f"speeds {name} {family} {sync}", _planned(table, problem)


def streams() -> Iterator[Case]:
    """A batch whose lengths arrive while the run trains."""
    for sync in SYNCS:
        problem = _problem(16, 16_384, sync)
        table = family_table("commoncrawl", sequences=64, seed=0)
        solver = make_solver("fcp", GlobalBatches(table, problem, _settings(table)))
        planner = StreamPlanner(stream_metadata(problem, solver, None, stream_batching(None, None)))
        yield f"streams 1 {sync}", [planner.plan(table, step=4, first_sequence=100)]


def encoders() -> Iterator[Case]:
    """Sequences with images, whose encoder's work stays with the rings or is shared over the wave."""
    generator = np.random.default_rng(0)
    table = replace(
        family_table("wikipedia", sequences=96, seed=0),
        vision_patches=generator.integers(0, 8_192, 96),
        vision_patch_pairs=generator.integers(0, 8_192, 96) ** 2 // 4,
    )
    profile = profile_of("qwen3-vl-8b", "h100-8x8")
    for sync in SYNCS:
        yield f"encoders ring {sync}", _planned(table, _problem(16, 16_384, sync, profile=profile))
    shared = _problem(16, 16_384, "microbatch", profile=profile, encoder_balance="wave")
    yield "encoders wave microbatch", _planned(table, shared)


def _problem(ranks: int, budget: int, sync: Sync, *, profile: CostProfile | None = None, **more: Any) -> Problem:
    return Problem(
        num_ranks=ranks,
        ranks_per_node=8,
        tokens_per_rank=budget,
        sync=sync,
        profile=profile or example_profile(),
        **more,
    )


def _settings(table: LengthTable) -> BatchSettings:
    return BatchSettings(global_batch_size=len(table), shuffle=False)


def _planned(table: LengthTable, problem: Problem, name: str = "fcp", **limits: Any) -> list[StepPlan] | str:
    """Plan the whole table as one step; a strategy's refusal is an answer, too."""
    try:
        batches = GlobalBatches(table, problem, _settings(table))
        solver = make_solver(name, batches, **limits)
        return [assemble(solver.assign(batch), batch, problem) for batch in batches]
    except (PlanError, UsageError) as error:
        return type(error).__name__


def line_of(case: Case) -> str:
    """Return `name layout-hash seconds-hash`, or the name and why there is no plan."""
    name, steps = case
    if isinstance(steps, str):
        return f"{name}: {steps}"
    layout, seconds = hashlib.sha256(), hashlib.sha256()
    for step in steps:
        rows: list[npt.NDArray[Any]] = [step.wave, step.rank_offsets, step.ranks]
        rows += [step.sequence_offsets, step.sequences]
        rows += [] if step.heads_degree is None else [step.heads_degree]
        for array in rows:
            layout.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        for array in (step.start_seconds, step.seconds, np.array([step.makespan_seconds, step.bound_seconds])):
            seconds.update(array.tobytes())
    return f"{name}: {layout.hexdigest()[:16]} {seconds.hexdigest()[:16]}"


SECTIONS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "families": lambda full: families(64, 512) if full else families(16, 96),
    "shapes": lambda _: shapes(),
    "limits": lambda _: limits(),
    "pipelines": lambda _: pipelines(),
    "heads": lambda _: shared_heads(),
    "speeds": lambda _: speeds(),
    "streams": lambda _: streams(),
    "encoders": lambda _: encoders(),
}


def differences(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """Return a line for each case of either list whose hashes are not the same in both."""
    old = dict(line.split(": ", 1) for line in before if ": " in line)
    new = dict(line.split(": ", 1) for line in now)
    found = []
    for name in sorted(old.keys() | new.keys()):
        was, becomes = old.get(name, "missing"), new.get(name, "missing")
        if was != becomes:
            kind = "seconds" if was.split()[0] == becomes.split()[0] else "plan"
            found.append(f"{name}: another {kind}: {was} -> {becomes}")
    return found


def main() -> int:
    """Print the lines, or those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="FILE", help="lines printed before, to compare with")
    parser.add_argument("--full", action="store_true", help="families of 512 sequences on 64 ranks")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="SECTION")
    options = parser.parse_args()
    lines = []
    for name in options.only:
        for case in SECTIONS[name](options.full):
            lines.append(line_of(case))
            if options.against is None:
                print(lines[-1], flush=True)
    if options.against is None:
        return 0
    before = options.against.read_text(encoding="utf-8").splitlines()
    found = differences((line for line in before if line.split()[0] in options.only), lines)
    print("\n".join([*found, f"{len(lines)} cases, {len(found)} differ"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
