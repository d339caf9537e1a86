"""Rings against groups that split heads as well, by the cost model: whole steps, and one sequence on each degree.

    python -m benchmarks.split_heads [--picture docs/pictures/split-heads.svg | --times]

Steps hold as many sequences of one length as nearly fill 64 ranks once, and short ones beside them; or 512 sequences of
a family of `benchmarks.workloads`: predicted seconds of `fcp plan` with rings alone / with `--attention 2d`. The
picture shows one sequence of qwen3-8b alone on 2 to 64 ranks. `--times`: what planning takes with rings alone and with
both, qwen3-8b on h100-8x8.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.workloads import FAMILIES, lengths
from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.cost.recipe import Recipe, SplitAttention
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile

SYNCS: Final[tuple[Sync, ...]] = ("iteration", "microbatch")
MODELS = "qwen3-8b", "qwen3-32b", "llama3-70b"
CLUSTERS = "h100-8x8", "h200-8x8", "a100-8x8", "ascend910b-8x8"
BUDGETS, LENGTHS = (16_384, 65_536), (131_072, 262_144, 524_288, 1_048_576)
_BOTH: Final[tuple[SplitAttention | None, ...]] = (None, "2d")
_FAMILIES = (*FAMILIES, "video", "bimodal")
RANKS, PER_NODE, DEGREES = 64, 8, (2, 4, 8, 16, 32, 64)


def profile_of(model: str, cluster: str) -> CostProfile:
    """Compute the profile of a model on 64 ranks of a cluster, activations recomputed."""
    recipe = Recipe(zero_stage=3, precision="bf16", recompute="full")
    profile = analytic_profile(load_model(model), load_cluster(cluster), recipe=recipe, sync="microbatch", ranks=RANKS)
    return replace(profile, text=dump_cost_profile(profile))


def long_lengths(budget: int, length: int) -> list[int]:
    """Return sequences of one length that nearly fill all ranks once, and short ones."""
    long = max(1, int(0.9 * RANKS * budget) // length)
    return [length] * long + [2048] * (RANKS * budget // 10 // 2048)


def step_seconds(
    profile: CostProfile, budget: int, of_lengths: Sequence[int], attention: SplitAttention | None
) -> float:
    """Plan a step and return what it takes."""
    return _planned(_batches(profile, budget, of_lengths, attention, "microbatch"))


def _batches(
    profile: CostProfile, budget: int, of_lengths: Sequence[int], attention: SplitAttention | None, sync: Sync
) -> GlobalBatches:
    problem = Problem(
        num_ranks=RANKS,
        ranks_per_node=PER_NODE,
        tokens_per_rank=budget,
        attention=attention,
        sync=sync,
        profile=profile,
    )
    table = LengthTable(name="lengths", length_tokens=np.array(of_lengths, dtype=np.int64))
    return GlobalBatches(table, problem, BatchSettings(global_batch_size=len(of_lengths), shuffle=False))


def _planned(batches: GlobalBatches) -> float:
    batch = batches.batch(0)
    return assemble(make_solver("fcp", batches).assign(batch), batch, batches.problem).makespan_seconds


def print_times() -> None:
    """Print the milliseconds of processor time in which steps of 512 sequences are planned, rings and both in turns."""
    profile = profile_of("qwen3-8b", "h100-8x8")
    for sync in SYNCS:
        ratios = []
        for budget, family in product((16_384, 8_192), _FAMILIES):
            drawn = _steps("families", budget)[family]
            both = [_batches(profile, budget, drawn, attention, sync) for attention in _BOTH]
            taken = np.array([[_milliseconds(one) for one in both] for _ in range(4)])[1:].min(axis=0)
            ratios.append(taken[1] / taken[0])
            print(f"{sync:10} {budget:6} {family:12} {taken[0]:8.1f} {taken[1]:8.1f} {ratios[-1]:6.2f}", flush=True)
        print(f"{sync:10} median {np.median(ratios):.2f}, most {max(ratios):.2f}")


def _milliseconds(batches: GlobalBatches) -> float:
    started = time.process_time()
    _planned(batches)
    return 1e3 * (time.process_time() - started)


def alone_seconds(profile: CostProfile, length: int, degree: int, heads_degree: int) -> float:
    """Return what one sequence takes on a group of whole nodes."""
    return float(
        group_seconds(
            profile,
            causal_work(np.array([length]), profile.coefficients),
            degree=degree,
            crosses_nodes=degree > PER_NODE,
            heads_degree=heads_degree,
        )[0]
    )


def best_split(profile: CostProfile, length: int, degree: int) -> float:
    """Return what it takes with the best heads degree inside a node."""
    assert profile.heads is not None
    splits = [u for u in (1, *profile.heads.degrees(PER_NODE)) if math.gcd(degree, PER_NODE) % u == 0]
    return min(alone_seconds(profile, length, degree, u) for u in splits)


def print_steps() -> None:
    """Print ring seconds / 2D seconds of whole steps, by cluster and budget: geometric mean and extremes."""
    for kind in ("long sequences", "families"):
        print(f"{kind:40}{'geo. mean':>10}{'least':>8}{'most':>8}")
        for cluster in CLUSTERS:
            profiles = {model: profile_of(model, cluster) for model in MODELS}
            for budget in BUDGETS:
                gains = {
                    f"{model}, {name}": step_seconds(profile, budget, drawn, None)
                    / step_seconds(profile, budget, drawn, "2d")
                    for model, profile in profiles.items()
                    for name, drawn in _steps(kind, budget).items()
                }
                most, least = max(gains, key=gains.__getitem__), min(gains.values())
                mean = math.exp(float(np.mean(np.log(list(gains.values())))))
                row = (
                    f"{cluster + f', {budget // 1024}k a rank':40}{mean:10.3f}{least:8.3f}{gains[most]:8.3f}  ({most})"
                )
                print(row, flush=True)


def _steps(kind: str, budget: int) -> dict[str, list[int]]:
    if kind == "families":
        return {family: lengths(family, sequences=512, seed=0).tolist() for family in _FAMILIES}
    return {f"{one // 1024}k": long_lengths(budget, one) for one in LENGTHS if one <= RANKS * budget}


def drawing() -> str:
    """Return an SVG: seconds over length by degree on each cluster, rings dashed, the best u x r solid."""
    legend = "".join(
        f'<text x="{60 + 70 * i}" y="16" fill="{colour}">d = {degree}</text>'
        for i, (colour, degree) in enumerate(zip(_COLOURS, DEGREES, strict=True))
    )
    panels = "\n".join(
        line
        for place, name in enumerate(CLUSTERS)
        for line in _panel(name, place % 2 * _WIDTH, place // 2 * _HEIGHT + 24)
    )
    width, height = 2 * _WIDTH, 2 * _HEIGHT + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{legend}'
        f'<text x="490" y="16">dashed: rings; solid: best u x r</text>\n{panels}\n</svg>\n'
    )


_WIDTH, _HEIGHT = 330, 230
_COLOURS = "#2166ac", "#4393c3", "#92c5de", "#f4a582", "#d6604d", "#b2182b"
_DRAWN = [2**k for k in range(13, 21)]
_LEAST, _MOST = math.log10(0.2), math.log10(6000)


def _panel(cluster: str, left: float, top: float) -> Iterator[str]:
    profile, bottom = profile_of("qwen3-8b", cluster), top + _HEIGHT - 35

    def y(seconds: float) -> float:
        return bottom - (math.log10(seconds) - _LEAST) / (_MOST - _LEAST) * 165

    yield f'<text x="{left + 45}" y="{top + 18}" font-weight="bold">{cluster}</text>'
    for seconds in (1, 10, 100, 1000):
        yield f'<path d="M{left + 45} {y(seconds):.1f}h270" stroke="#ddd"/>'
        yield f'<text x="{left + 40}" y="{y(seconds) + 4:.1f}" text-anchor="end">{seconds} s</text>'
    for i, length in enumerate(_DRAWN):
        yield f'<text x="{left + 45 + 38 * i}" y="{bottom + 18}" text-anchor="middle">{length // 1024}k</text>'
    for colour, degree in zip(_COLOURS, DEGREES, strict=True):
        rings = [alone_seconds(profile, length, degree, 1) for length in _DRAWN]
        splits = [best_split(profile, length, degree) for length in _DRAWN]
        for dash, values in (("4 3", rings), ("none", splits)):
            points = " ".join(f"{left + 45 + 38 * i},{y(value):.1f}" for i, value in enumerate(values))
            yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--picture", type=Path, help="write the picture here")
    parser.add_argument("--times", action="store_true", help="what planning takes, in place of what steps take")
    arguments = parser.parse_args()
    if arguments.times:
        print_times()
        return
    if arguments.picture is not None:
        arguments.picture.write_text(drawing(), encoding="utf-8")
        return
    print_steps()


if __name__ == "__main__":
    main()
