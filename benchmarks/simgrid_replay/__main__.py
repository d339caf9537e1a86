"""Predicted seconds of steps beside a replay in SimGrid, where messages share links: `make simgrid`.

    python -m benchmarks.simgrid_replay [--ranks 64 1024] [--blocks 4] [--cluster h100]

A step of each family is planned for nodes of 8 devices. Its rings' messages and computations, and under `microbatch`
the gathers of ZeRO-3, are replayed by an independent engine (`engine.py`) on three networks:

- alone: no message shares a link with another rank's; what differs from the prediction is the replay itself, which has
  a ring's hops one by one, and what waits for whom.
- rails: NVLink islands, one port a device, a switch for each rail; ranks of different rails meet above the switches, by
  half the ports' rate.
- fat tree: the same ports under a switch for each four nodes, which reach others by half the ports' rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final, Literal, get_args

from benchmarks.workloads import FAMILIES, family_table
from fcp_cli.cost.model import group_terms
from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.rings import ring_order
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile

Network = Literal["alone", "rails", "fat tree"]
PER_NODE: Final = 8
SEQUENCES_PER_RANK, TOKENS_PER_RANK = 8, 16_384
NODES_PER_SWITCH, OVERSUBSCRIBED = 4, 2.0
_PYTHON: Final = "/usr/bin/python3"  # that Debian's python3-simgrid is for


def planned_step(cluster: str, ranks: int, family: str, sync: Sync) -> tuple[StepPlan, Problem]:
    """Plan one step of a family."""
    recipe = Recipe(zero_stage=3, recompute="full") if sync == "microbatch" else Recipe(zero_stage=2, recompute="full")
    profile = analytic_profile(load_model("qwen3-8b"), load_cluster(cluster), recipe=recipe, sync=sync, ranks=ranks)
    problem = Problem(
        num_ranks=ranks, ranks_per_node=PER_NODE, tokens_per_rank=TOKENS_PER_RANK, sync=sync, profile=profile
    )
    table = family_table(family, sequences=SEQUENCES_PER_RANK * ranks, seed=0)
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(table), shuffle=False))
    batch = batches.batch(0)
    return assemble(make_solver("fcp", batches).assign(batch), batch, problem, bound_seconds=0.0), problem


def workload(step: StepPlan, problem: Problem, network: Network, blocks: int) -> dict[str, Any]:
    """Return everything that the engine replays: programs of all ranks, links, and routes of pairs that meet."""
    programs: list[list[dict[str, Any]]] = [[] for _ in range(problem.num_ranks)]
    last_wave = [0] * problem.num_ranks
    for row in step.microbatches():
        for rank, work in _works(row, problem):
            work["waits"] = problem.sync == "microbatch" and row.wave != last_wave[rank]
            last_wave[rank] = row.wave
            programs[rank].append(work)
    pairs = {(r, m["to"]) for r, works in enumerate(programs) for w in works for m in (w["ring"], w["gather"]) if m}
    links: dict[str, float] = {}
    routes = [(one, other, _path(one, other, network, problem, links)) for one, other in sorted(pairs)]
    c = problem.profile.coefficients
    return {
        "programs": programs,
        "blocks": blocks,
        "links": links,
        "routes": routes,
        "message_seconds": c.ring_hop_seconds / blocks,
    }


def _works(row: MicroBatch, problem: Problem) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (rank, its work) of a micro-batch: seconds of kernels, and bytes of each hop of all layers."""
    profile, degree = problem.profile, row.degree
    crosses = len({rank // PER_NODE for rank in row.ranks}) > 1
    rate = profile.bandwidth.inter_node if crosses else profile.bandwidth.intra_node
    seconds, hops = _parts(profile, row, crosses=crosses), degree - 1
    order = ring_order(row.ranks, PER_NODE)
    for place, rank in enumerate(order):
        neighbours = {"to": order[(place + 1) % degree], "from": order[place - 1]}
        yield (
            rank,
            {
                "name": f"{row.order}",
                "hops": hops,
                "fixed_seconds": 0.0 if row.is_idle else profile.coefficients.microbatch_seconds,
                "linear_seconds": seconds["linear"],
                "attention_seconds": seconds["attention"],
                "ring": {**neighbours, "bytes": seconds["ring_bytes"] / hops} if hops else None,
                "home": {**neighbours, "bytes": seconds["home"] * rate} if seconds["home"] else None,
                "gather": _gather(rank, problem),
            },
        )


def _parts(profile: CostProfile, row: MicroBatch, *, crosses: bool) -> dict[str, float]:
    """Return the parts of the cost model's prediction for a micro-batch, by its own formulas."""
    c, degree, tokens = profile.coefficients, row.degree, row.tokens
    squares = c.attention_seconds_per_token2 * float(sum(length**2 for length in row.lengths))
    terms = group_terms(profile, degree=degree, crosses_nodes=crosses)
    home = float(terms.home * tokens + terms.home_hop)
    hidden = float(terms.ring * tokens + terms.hops) - home - c.ring_hop_seconds * (degree - 1)
    rate = profile.bandwidth.inter_node if crosses else profile.bandwidth.intra_node
    attention = squares / degree + terms.chunk * tokens
    linear = c.linear_seconds_per_token * tokens / degree
    return {"linear": linear, "attention": float(attention), "ring_bytes": max(0.0, hidden) * rate, "home": home}


def _gather(rank: int, problem: Problem) -> dict[str, Any] | None:
    """Return what ZeRO-3 sends from a rank in a wave: to the same place in the next node, at the ports' rate."""
    seconds = problem.profile.step.floor_seconds(problem.sync)
    if not seconds:
        return None
    size = seconds * problem.profile.bandwidth.inter_node
    ranks = problem.num_ranks
    return {"to": (rank + PER_NODE) % ranks, "from": (rank - PER_NODE) % ranks, "bytes": size}


def _path(one: int, other: int, network: Network, problem: Problem, links: dict[str, float]) -> list[str]:
    """Return the links from one rank to another, and enter their rates into `links`."""
    intra, inter = problem.profile.bandwidth.intra_node, problem.profile.bandwidth.inter_node
    here, there = one // PER_NODE, other // PER_NODE
    rate = intra if here == there else inter
    if network == "alone":
        path = {f"{one}>{other}": rate}
    elif here == there:
        path = {f"out{one}": intra, f"in{other}": intra}
    else:
        path = {f"port-out{one}": inter, **_above(one, other, network, inter), f"port-in{other}": inter}
    links.update(path)
    return list(path)


def _above(one: int, other: int, network: Network, inter: float) -> dict[str, float]:
    """Return the links above the switches that a message between nodes passes."""
    if network == "rails":
        rails = one % PER_NODE, other % PER_NODE
        ports = NODES_PER_SWITCH
        switches = tuple((r // PER_NODE // NODES_PER_SWITCH, rail) for r, rail in zip((one, other), rails, strict=True))
        if rails[0] == rails[1]:
            return {}
    else:
        ports = NODES_PER_SWITCH * PER_NODE
        switches = tuple((rank // ports, 0) for rank in (one, other))
        if switches[0] == switches[1]:
            return {}
    rate = ports * inter / OVERSUBSCRIBED
    return {f"up{switches[0]}": rate, f"down{switches[1]}": rate}


def replayed_seconds(step: StepPlan, problem: Problem, network: Network, blocks: int) -> float:
    """Return the seconds of the rank that ends last."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.json"
        path.write_text(json.dumps(workload(step, problem, network, blocks)), encoding="utf-8")
        engine = Path(__file__).with_name("engine.py")
        done = subprocess.run([_PYTHON, str(engine), str(path)], capture_output=True, text=True, check=True)
    return float(max(json.loads(done.stdout.splitlines()[-1])))


def main() -> None:
    """Print one table in Markdown: replayed over predicted, without what closes a step in both."""
    parser = argparse.ArgumentParser(description="Predicted seconds of steps beside a replay in SimGrid.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--blocks", type=int, default=4, help="groups of layers that the replay tells apart")
    options = parser.parse_args()
    if shutil.which(_PYTHON) is None:
        raise SystemExit(f"there is no {_PYTHON}: install Debian's python3-simgrid ('make simgrid' does)")
    print("| ranks | sync | lengths | predicted, s | " + " | ".join(get_args(Network)) + " |")
    print("|---|---|---|---:|---:|---:|---:|")
    errors: dict[str, list[float]] = {network: [] for network in get_args(Network)}
    syncs: tuple[Sync, ...] = get_args(Sync)
    for ranks, sync, family in product(options.ranks, syncs, FAMILIES):
        step, problem = planned_step(options.cluster, ranks, family, sync)
        predicted = step.makespan_seconds - problem.profile.step.closing_seconds(sync)
        cells = []
        for network in get_args(Network):
            ratio = replayed_seconds(step, problem, network, options.blocks) / predicted
            errors[network].append(ratio)
            cells.append(f"{ratio:.3f}")
        print(f"| {ranks} | {sync} | {family} | {predicted:.2f} | {' | '.join(cells)} |", flush=True)
    means = " | ".join(f"{statistics.geometric_mean(ratios):.3f}" for ratios in errors.values())
    print(f"| | | geometric mean | | {means} |")


if __name__ == "__main__":
    main()
