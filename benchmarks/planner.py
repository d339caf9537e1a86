"""Gap, time and price of the solver `fcp` on the benchmark families: `python benchmarks/planner.py families`.

Seconds are predicted by the cost model; milliseconds are CPU time of one process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.picture import write_growth
from benchmarks.workloads import FAMILIES, HELD_OUT, MAX_LENGTH, example_profile, family_table, lengths, real_table
from fcp_cli.errors import PlanError
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.rings import ring_pairs
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.assemble import assemble, makespan_seconds
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.bounds import simple_bound_seconds
from fcp_cli.planning.problem import Problem, Solver
from fcp_cli.planning.solvers import make_solver
from fcp_cli.planning.strategies import fcp_paper, flexsp
from fcp_cli.util.arrays import FloatArray

SYNCS: tuple[Sync, ...] = ("iteration", "microbatch")
RIVALS = (
    "static",
    "fcp-paper",
    "bytescale",
    "karmarkar-karp",
    "megatron-dynamic-cp",
    "megatron-packing",
    "megatron-any-degree",
)


def problem_of(sync: Sync, *, ranks: int, per_node: int, budget: int) -> Problem:
    return Problem(
        num_ranks=ranks, ranks_per_node=per_node, tokens_per_rank=budget, sync=sync, profile=example_profile()
    )


def solver_of(name: str, batches: GlobalBatches, *, milp_seconds: float) -> Solver:
    """A solver by its name; `fcp-paper:CUT` is the published algorithm with one cut, into the fewest waves."""
    if name == "flexsp":
        return flexsp.make_solver(batches, milp_seconds=milp_seconds)
    if name.startswith("fcp-paper:"):
        cut = name.removeprefix("fcp-paper:")
        return fcp_paper.make_solver(batches, cuts=[cut], wave_counts=1)
    return make_solver(name, batches)


def plan(
    table: LengthTable,
    problem: Problem,
    solver_name: str,
    *,
    batch_size: int,
    step_limit: int | None = None,
    milp_seconds: float = flexsp.MILP_SECONDS,
) -> list[tuple[StepPlan, float, float]]:
    """(planned step, simple bound, milliseconds of CPU for solver and assembly) of every step."""
    settings = BatchSettings(
        global_batch_size=batch_size,
        shuffle=len(table) > batch_size,
        max_length=MAX_LENGTH,
        overlong="drop",
        step_limit=step_limit,
    )
    batches = GlobalBatches(table, problem, settings)
    solver = solver_of(solver_name, batches, milp_seconds=milp_seconds)
    if solver_name == "fcp":
        solver.assign(batches.batch(0))  # compiled code is loaded now
    rows = []
    for batch in batches:
        started = time.process_time()
        step = assemble(solver.assign(batch), batch, problem)
        rows.append((step, simple_bound_seconds(batch.work, problem), 1e3 * (time.process_time() - started)))
        assert step.makespan_seconds >= step.bound_seconds * (1 - 1e-9), "the bound is beaten"
    return rows


def families(options: argparse.Namespace) -> None:
    """Mean gap per family, budget and sync."""
    print(f"{'sync':10} {'budget':>6} {'family':12} {'gap':>7} {'proven gap':>10} {'bound above':>11} {'ms':>6}")
    for sync in SYNCS:
        for budget in (16_384, 8_192):
            totals = []
            for family in (*options.family, *(["linux"] if options.real else [])):
                problem = problem_of(sync, ranks=options.ranks, per_node=8, budget=budget)
                batch_size = options.ranks * 8
                rows = []
                if family == "linux":
                    rows += plan(real_table(options.real), problem, options.solver, batch_size=batch_size)
                else:
                    for seed in range(options.seeds):
                        table = family_table(family, sequences=batch_size, seed=seed)
                        rows += plan(table, problem, options.solver, batch_size=batch_size)
                gap = _mean_percent(rows, lambda step, bound: step.makespan_seconds / bound)
                proven = _mean_percent(rows, lambda step, _: step.makespan_seconds / step.bound_seconds)
                if family != "linux":
                    totals.append((gap, proven))
                print(
                    f"{sync:10} {budget:6} {family:12} {gap:6.2f}% {proven:9.2f}% "
                    f"{_mean_percent(rows, lambda step, bound: step.bound_seconds / bound):10.2f}% "
                    f"{statistics.median(ms for _, _, ms in rows):6.1f}",
                    flush=True,
                )
            gap, proven = np.mean(totals, axis=0)
            print(f"{sync:10} {budget:6} {'mean':12} {gap:6.2f}% {proven:9.2f}%")


def _mean_percent(rows: list[tuple[StepPlan, float, float]], ratio: Callable[[StepPlan, float], float]) -> float:
    return 100.0 * (float(np.mean([ratio(step, bound) for step, bound, _ in rows])) - 1.0)


def growth(options: argparse.Namespace) -> None:
    """Time and gap over the number of ranks, eight (above 8,192: four) sequences per rank; optionally a picture."""
    milliseconds: dict[str, list[tuple[float, float]]] = {sync: [] for sync in SYNCS}
    gaps: dict[str, list[tuple[float, float]]] = {sync: [] for sync in SYNCS}
    print(f"{'ranks':>6} {'batch':>6} {'sync':10} {'family':12} {'gap':>7} {'proven gap':>10} {'ms':>9}")
    ranks = 8
    while ranks <= options.ranks:
        batch_size = ranks * (8 if ranks <= 8192 else 4)
        for sync in SYNCS:
            taken, left = [], []
            for family in options.family or FAMILIES:
                problem = problem_of(sync, ranks=ranks, per_node=8, budget=options.budget)
                rows = plan(
                    family_table(family, sequences=batch_size, seed=0), problem, options.solver, batch_size=batch_size
                )
                step, bound, ms = rows[0]
                taken.append(ms)
                left.append(100 * step.gap)
                print(
                    f"{ranks:6} {batch_size:6} {sync:10} {family:12} "
                    f"{100 * (step.makespan_seconds / bound - 1):6.2f}% {100 * step.gap:9.2f}% {ms:9.1f}",
                    flush=True,
                )
            milliseconds[sync].append((ranks, float(np.mean(taken))))
            gaps[sync].append((ranks, float(np.mean(left))))
        ranks *= options.factor
    if options.picture:
        write_growth(
            options.picture,
            {
                "CPU milliseconds per step, mean of four families": (milliseconds, True),
                "gap to the proven bound, %": (gaps, False),
            },
        )


def groups(options: argparse.Namespace) -> None:
    """Price of a limit on the groups of a plan of 32 steps per family, and how many groups there are without.

    The groups are chosen on 16 of the steps and priced on the others.
    """
    from fcp_cli.planning import fcp_solver as fcp

    print(
        f"{'sync':10} {'budget':>6} {'family':12} {'unlimited':>9} " + " ".join(f"{g:>4} groups" for g in options.limit)
    )
    for sync in SYNCS:
        for budget in (16_384, 8_192):
            for family in FAMILIES:
                problem = problem_of(sync, ranks=64, per_node=8, budget=budget)
                table = family_table(family, sequences=512 * 32, seed=0)
                batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=512))
                solver = fcp.make_solver(batches)
                steps = [assemble(solver.assign(batch), batch, problem) for batch in batches]
                groups = {row.ranks for step in steps for row in step.microbatches() if row.degree > 1}
                prices = [
                    100 * fcp.limit_price(fcp.make_solver(batches, max_groups=limit), batches)
                    for limit in options.limit
                ]
                print(
                    f"{sync:10} {budget:6} {family:12} {len(groups):9} " + " ".join(f"{p:10.2f}%" for p in prices),
                    flush=True,
                )


def peers(options: argparse.Namespace) -> None:
    """Peers per rank and their price, without and with limits: steps of all families, all of them priced.

    `ascending` is what rings in the order of their ranks would need, `folded` what they need as fcp orders them.
    """
    limits = " ".join(f"{f'--max-peers {limit}':>23}" for limit in options.limit)
    print("peers: mean and most; price in step time; CPU milliseconds per step")
    print(f"{'sync':10} {'budget':>6} {'family':12} {'ascending':>11} {'folded':>11} {'ms':>6} {limits}")
    for sync, budget, family in product(SYNCS, (16_384, 8_192), options.family or FAMILIES):
        problem = problem_of(sync, ranks=options.ranks, per_node=8, budget=budget)
        batch_size = 8 * options.ranks
        table = family_table(family, sequences=batch_size * options.steps, seed=0)
        batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=batch_size))
        free, free_ms = _timed_steps(make_solver("fcp", batches), batches)
        seconds = sum(step.makespan_seconds for step in free)
        columns = [_peers_text(_ascending_pairs(free), options.ranks), _peers_text(_ring_pairs(free), options.ranks)]
        columns.append(f"{free_ms:6.0f}")
        for limit in options.limit:
            steps, ms = _timed_steps(make_solver("fcp", batches, max_peers=limit), batches)
            price = sum(step.makespan_seconds for step in steps) / seconds - 1.0
            columns.append(f"{_peers_text(_ring_pairs(steps), options.ranks)} {100 * price:+6.2f}% {ms:3.0f}")
        print(f"{sync:10} {budget:6} {family:12} " + " ".join(columns), flush=True)


def _timed_steps(solver: Solver, batches: GlobalBatches) -> tuple[list[StepPlan], float]:
    """Return the planned steps and the milliseconds of CPU time that each took, the bound left out."""
    solver.assign(batches.batch(0))  # compiled code is loaded now
    started = time.process_time()
    found = [(solver.assign(batch), batch) for batch in batches]
    taken = 1e3 * (time.process_time() - started) / len(found)
    return [assemble(assignment, batch, batches.problem, 1.0) for assignment, batch in found], taken


def _ring_pairs(steps: list[StepPlan]) -> set[tuple[int, int]]:
    return {pair for ranks in _ring_ranks(steps) for pair in ring_pairs(ranks, 8)}


def _ascending_pairs(steps: list[StepPlan]) -> set[tuple[int, int]]:
    rings = _ring_ranks(steps)
    return {(min(pair), max(pair)) for ranks in rings for pair in zip(ranks, (*ranks[1:], ranks[0]), strict=True)}


def _ring_ranks(steps: list[StepPlan]) -> set[tuple[int, ...]]:
    return {row.ranks for step in steps for row in step.microbatches() if row.degree > 1}


def _peers_text(pairs: set[tuple[int, int]], ranks: int) -> str:
    counts = np.bincount(np.array(list(pairs), dtype=np.int64).ravel(), minlength=ranks)
    return f"{counts.mean():6.1f} {counts.max():4}"


def rivals(options: argparse.Namespace) -> None:
    """Step by step against other strategies: their step time over that of fcp under the same sync.

    Their step time over the proven bound is what no planner could gain more than.
    """
    print(f"{'sync':10} {'budget':>6} {'strategy':20} {'family':12} their step time over fcp's, per step")
    for sync in options.sync:
        ratios: dict[str, list[float]] = defaultdict(list)
        over_bound: dict[str, list[float]] = defaultdict(list)
        for budget in options.budget:
            problem = problem_of(sync, ranks=64, per_node=8, budget=budget)
            for family in FAMILIES:
                tables = [family_table(family, sequences=512 * options.steps, seed=seed) for seed in options.seed]
                ours = [row for table in tables for row in plan(table, problem, "fcp", batch_size=512)]
                for name in options.rival:
                    theirs = [
                        row
                        for table in tables
                        for row in plan(table, problem, name, batch_size=512, milp_seconds=options.milp_seconds)
                    ]
                    found = [
                        their.makespan_seconds / our.makespan_seconds
                        for (their, *_), (our, *_) in zip(theirs, ours, strict=True)
                    ]
                    ratios[name] += found
                    over_bound[name] += [1.0 + their.gap for their, *_ in theirs]
                    shown = " ".join(f"{ratio:.3f}" for ratio in found)
                    print(f"{sync:10} {budget:6} {name:20} {family:12} {shown}", flush=True)
        for name, found in ratios.items():
            print(
                f"{sync:10} {'all':>6} {name:20} {'all':12} geometric mean {statistics.geometric_mean(found):.3f}, "
                f"least {min(found):.3f}, over the bound {statistics.geometric_mean(over_bound[name]):.3f}; "
                f"quicker than fcp on {sum(ratio < 1 for ratio in found)} of {len(found)} steps",
                flush=True,
            )


def scattered(options: argparse.Namespace) -> None:
    """How often other strategies are quicker than fcp under the same sync, and by how much, on random problems."""
    steps: Counter[tuple[Sync, str]] = Counter()
    gains: dict[tuple[Sync, str], list[float]] = defaultdict(list)
    for seed, sync in product(range(options.problems), SYNCS):
        batches = _random_batches(seed, sync)
        batch = batches.batch(0)
        ours = makespan_seconds(make_solver("fcp", batches).assign(batch), batch, batches.problem)
        for name in options.rival:
            with suppress(PlanError):  # no degree of some strategies holds the longest sequence
                theirs = make_solver(name, batches).assign(batch)
                steps[sync, name] += 1
                gain = 1.0 - makespan_seconds(theirs, batch, batches.problem) / ours
                if gain > 1e-9:
                    gains[sync, name].append(100 * gain)
    for (sync, name), count in sorted(steps.items()):
        found = gains[sync, name]
        by = f", by {statistics.median(found):.2f} % at the median, {max(found):.2f} % at most" if found else ""
        print(f"{sync:10} {name:20} quicker on {len(found)} of {count} steps{by}")


def _random_batches(seed: int, sync: Sync) -> GlobalBatches:
    """One batch on two to eight nodes of eight: lengths of many kinds, cheap and dear attention, waves and networks."""
    generator = np.random.default_rng(seed)
    ranks, budget = int(generator.choice([16, 32, 48, 64])), int(generator.choice([4096, 8192, 16384]))
    count = int(generator.integers(ranks, 8 * ranks + 1))
    kinds: dict[str, Callable[[], FloatArray]] = {
        "lognormal": lambda: generator.lognormal(np.log(budget / 8), 1.0, count),
        "pareto": lambda: budget / 16 * (1 - generator.random(count)) ** (-1 / generator.uniform(0.8, 1.5)),
        "uniform": lambda: generator.uniform(1, budget * generator.choice([0.5, 1, 3]), count),
        "equal": lambda: np.full(count, budget * generator.choice([0.1, 0.3, 0.55, 1.0, 1.5])),
        "one long": lambda: np.append(generator.uniform(budget / 8, budget, count - 1), budget * ranks / 4),
    }
    for name in HELD_OUT:
        kinds[name] = partial(_scaled, name, count, seed, budget / 16_384)
    drawn = kinds[str(generator.choice(list(kinds)))]()
    profile = example_profile()
    coefficients = replace(
        profile.coefficients,
        attention_seconds_per_token2=float(generator.choice([6.451e-10, 6.451e-9, 6.451e-8])),
        microbatch_seconds=float(generator.choice([0.01, 0.1, 1.0])),
        ring_hop_seconds=float(generator.choice([0.0, 0.005])),
    )
    bandwidth = replace(profile.bandwidth, inter_node=float(generator.choice([1e9, 12e9])))
    problem = replace(
        problem_of(sync, ranks=ranks, per_node=8, budget=budget),
        profile=replace(profile, coefficients=coefficients, bandwidth=bandwidth),
    )
    table = LengthTable(name="random", length_tokens=np.clip(drawn, 1, budget * ranks).astype(np.int64))
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=count, shuffle=False))


def _scaled(family: str, sequences: int, seed: int, factor: float) -> FloatArray:
    return np.asarray(factor * lengths(family, sequences=sequences, seed=seed), dtype=np.float64)


def stream(options: argparse.Namespace) -> None:
    """A plan of many sequences from manifest to file: wall time, memory, size."""
    from fcp_cli.planning.make_plan import make_plan
    from fcp_cli.planning.options import PlanRequest
    from fcp_cli.planning.settings import PlanInputs

    with tempfile.TemporaryDirectory() as folder:
        manifest, target = Path(folder) / "lengths.parquet", Path(folder) / "plan.parquet"
        drawn = lengths(options.family, sequences=options.sequences, seed=0)
        pq.write_table(pa.table({"length": drawn.astype(np.int32)}), manifest)
        started = time.perf_counter()
        result = make_plan(
            target,
            PlanInputs(
                table=real_table(manifest),
                problem=problem_of(options.sync, ranks=64, per_node=8, budget=options.budget),
                settings=BatchSettings(global_batch_size=512),
                request=PlanRequest(solver=options.solver),
            ),
            workers=options.workers,
        )
        seconds = time.perf_counter() - started
        memory = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        )
        print(
            f"{options.sequences} sequences of {options.family}, {options.sync}, {result.summary.steps} steps, "
            f"{options.workers} workers: {seconds:.1f} s wall, "
            f"{(memory[0] + options.workers * memory[1]) / 1e6:.2f} GB at most, "
            f"plan of {target.stat().st_size / 1e6:.0f} MB, gap {100 * result.summary.gap:.2f} %, "
            f"hash {result.metadata.plan_hash[:16]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("families", help=families.__doc__)
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--ranks", type=int, default=64)
    command.add_argument("--real", type=Path, help="a Parquet manifest, planned as well")
    command.add_argument("--family", nargs="+", default=FAMILIES, choices=[*FAMILIES, *HELD_OUT])
    command.set_defaults(run=families)
    command = commands.add_parser("growth", help=growth.__doc__)
    command.add_argument("--ranks", type=int, default=16_384)
    command.add_argument("--factor", type=int, default=2)
    command.add_argument("--budget", type=int, default=16_384)
    command.add_argument("--family", action="append")
    command.add_argument("--picture", type=Path, help="an SVG to write")
    command.set_defaults(run=growth)
    command = commands.add_parser("groups", help=groups.__doc__)
    command.add_argument("--limit", type=int, nargs="+", default=[64, 32, 16])
    command.set_defaults(run=groups)
    command = commands.add_parser("peers", help=peers.__doc__)
    command.add_argument("--limit", type=int, nargs="+", default=[8, 4])
    command.add_argument("--ranks", type=int, default=64)
    command.add_argument("--steps", type=int, default=20)
    command.add_argument("--family", nargs="+", choices=FAMILIES)
    command.set_defaults(run=peers)
    command = commands.add_parser("rivals", help=rivals.__doc__)
    command.add_argument("--rival", nargs="+", default=["fcp-paper", "fcp-paper:arrival", "static"])
    command.add_argument("--sync", nargs="+", default=SYNCS, choices=SYNCS)
    command.add_argument("--budget", type=int, nargs="+", default=[16_384, 8_192])
    command.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    command.add_argument("--steps", type=int, default=1, help="per family and seed")
    command.add_argument(
        "--milp-seconds", type=float, default=flexsp.MILP_SECONDS, help="limit of each program of flexsp"
    )
    command.set_defaults(run=rivals)
    command = commands.add_parser("scattered", help=scattered.__doc__)
    command.add_argument("--rival", nargs="+", default=RIVALS)
    command.add_argument("--problems", type=int, default=100)
    command.set_defaults(run=scattered)
    command = commands.add_parser("stream", help=stream.__doc__)
    command.add_argument("--sequences", type=int, default=10_000_000)
    command.add_argument("--family", default="github")
    command.add_argument("--sync", default="iteration", choices=SYNCS)
    command.add_argument("--budget", type=int, default=16_384)
    command.add_argument("--workers", type=int, default=2)
    command.set_defaults(run=stream)
    for command in commands.choices.values():
        command.add_argument("--solver", default="fcp")
    options = parser.parse_args()
    cast(Callable[[argparse.Namespace], None], options.run)(options)


if __name__ == "__main__":
    main()
