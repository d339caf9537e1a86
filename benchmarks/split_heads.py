"""Rings against groups that split heads as well, by the cost model: whole steps, and one sequence on each degree.

    python -m benchmarks.split_heads [--picture docs/pictures/split-heads.svg]

Steps hold as many sequences of one length as nearly fill 64 ranks once, and short ones beside them: predicted seconds
of `fcp plan` with rings alone / with `--attention 2d`. The picture shows one sequence of qwen3-8b alone on 2 to 64
ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from fcp_cli.cost.model import group_seconds
from fcp_cli.cost.profile import CostProfile, dump_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.analytic import analytic_profile
from fcp_cli.recipe import Recipe, SplitAttention

MODELS = "qwen3-8b", "qwen3-32b", "llama3-70b"
CLUSTERS = "h100-8x8", "h200-8x8", "a100-8x8", "ascend910b-8x8"
BUDGETS, LENGTHS = (16_384, 65_536), (131_072, 262_144, 524_288, 1_048_576)
RANKS, PER_NODE, DEGREES = 64, 8, (2, 4, 8, 16, 32, 64)


def profile_of(model: str, cluster: str) -> CostProfile:
    """Compute the profile of a model on 64 ranks of a cluster, activations recomputed."""
    recipe = Recipe(zero_stage=3, precision="bf16", recompute="full")
    profile = analytic_profile(load_model(model), load_cluster(cluster), recipe=recipe, sync="microbatch", ranks=RANKS)
    return replace(profile, text=dump_cost_profile(profile))


def step_seconds(profile: CostProfile, budget: int, length: int, attention: SplitAttention | None) -> float:
    """Plan a step and return what it takes."""
    long = max(1, int(0.9 * RANKS * budget) // length)
    lengths = [length] * long + [2048] * (RANKS * budget // 10 // 2048)
    table = LengthTable(name="lengths", length_tokens=np.array(lengths, dtype=np.int64))
    problem = Problem(
        num_ranks=RANKS,
        ranks_per_node=PER_NODE,
        tokens_per_rank=budget,
        attention=attention,
        sync="microbatch",
        profile=profile,
    )
    batches = GlobalBatches(table, problem, BatchSettings(global_batch_size=len(lengths), shuffle=False))
    batch = batches.batch(0)
    return assemble(make_solver("fcp", batches).assign(batch), batch, problem).makespan_seconds


def alone_seconds(profile: CostProfile, length: int, degree: int, heads_degree: int) -> float:
    """Return what one sequence takes on a group of whole nodes."""
    c = profile.coefficients
    return float(
        group_seconds(
            profile,
            attention_seconds=c.attention_seconds_per_token2 * float(length) ** 2,
            linear_seconds=c.linear_seconds_per_token * length,
            tokens=length,
            degree=degree,
            crosses_nodes=degree > PER_NODE,
            heads_degree=heads_degree,
        )
    )


def best_split(profile: CostProfile, length: int, degree: int) -> float:
    """Return what it takes with the best heads degree inside a node."""
    assert profile.heads is not None
    splits = [u for u in (1, *profile.heads.degrees(PER_NODE)) if math.gcd(degree, PER_NODE) % u == 0]
    return min(alone_seconds(profile, length, degree, u) for u in splits)


def print_steps() -> None:
    """Print ring seconds / 2D seconds of whole steps, by cluster and budget: geometric mean and extremes."""
    print(f"{'':40}{'geo. mean':>10}{'least':>8}{'most':>8}")
    for cluster in CLUSTERS:
        profiles = {model: profile_of(model, cluster) for model in MODELS}
        for budget in BUDGETS:
            gains = {
                (model, length): step_seconds(profile, budget, length, None)
                / step_seconds(profile, budget, length, "2d")
                for model, profile in profiles.items()
                for length in LENGTHS
                if length <= RANKS * budget
            }
            most, least = max(gains, key=gains.__getitem__), min(gains.values())
            mean = math.exp(float(np.mean(np.log(list(gains.values())))))
            where = f"{most[0]}, {most[1] // 1024}k"
            print(f"{cluster + f', {budget // 1024}k a rank':40}{mean:10.3f}{least:8.3f}{gains[most]:8.3f}  ({where})")


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
    arguments = parser.parse_args()
    if arguments.picture is not None:
        arguments.picture.write_text(drawing(), encoding="utf-8")
        return
    print_steps()


if __name__ == "__main__":
    main()
