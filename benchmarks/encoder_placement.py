"""Where the vision encoder's work goes: the same steps with it in four places. Predicted, nothing is run.

    python -m benchmarks.encoder_placement

`as the rings` is a homogeneous layout, in which every rank of a ring encodes all pictures of its pack, as encoders do
that inherit the language model's context parallelism; `shared in rings` is the plan's usual; then over the wave, and on
ranks of their own. All under one cost profile, with modules in lockstep wherever ranks run both. Last, one clip on a
single ring, its frames encoded by every rank against shared out (the two stages of MM-SP).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.workloads import media_manifest
from fcp_cli.cost.model import group_seconds, sequence_work, vision_seconds
from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.pricing import planned_sequences, step_prices, without_pictures
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.encoder_balance import with_encoder_ranks
from fcp_cli.planning.make_plan import plan_step
from fcp_cli.planning.problem import Problem
from fcp_cli.planning.solvers import make_solver
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.util.console import Assumptions

_CLIP_FRAMES, _CLIP_RANKS, _PAIR_PATCHES = 512, 8, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-vl-8b")
    parser.add_argument("--cluster", default="example-8x8")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=512, help="of a step")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--tokens-per-rank", type=int, default=16_384)
    parser.add_argument("--sets", nargs="+", default=["internvid", "openvid", "mixed"])
    arguments = parser.parse_args()
    settings = BatchSettings(
        global_batch_size=arguments.sequences, step_limit=arguments.steps, shuffle=False, overlong="drop"
    )
    print("| data set | encoder | as the rings | shared in rings | over the wave | ranks of its own |")
    print("|---" * 6 + "|")
    for frozen in (False, True):
        recipe = Recipe(zero_stage=3, recompute="full", freeze_vision=frozen)
        profile = analytic_profile(
            load_model(arguments.model),
            load_cluster(arguments.cluster),
            recipe=recipe,
            sync="microbatch",
            ranks=arguments.ranks,
        )
        problem = Problem(
            num_ranks=arguments.ranks,
            ranks_per_node=8,
            tokens_per_rank=arguments.tokens_per_rank,
            sync="microbatch",
            profile=profile,
            recipe=replace(recipe, zero_stage=1),
        )
        for name in arguments.sets:
            table = read_manifest(media_manifest(name, "qwen3-vl", arguments.sequences * arguments.steps))
            print(row(name, table, problem, settings, frozen=frozen), flush=True)
        print(f"| one clip of {_CLIP_FRAMES} frames, {_CLIP_RANKS} ranks | {_kind(frozen)} | {clip_text(profile)} | |")


def _kind(frozen: bool) -> str:
    return "frozen" if frozen else "trained"


def row(name: str, table: LengthTable, problem: Problem, settings: BatchSettings, *, frozen: bool) -> str:
    """Return a line of the table; gains are over the homogeneous layout."""
    over_wave = replace(problem, encoder_balance="wave")
    apart = with_encoder_ranks(GlobalBatches(table, problem, settings), "auto", Assumptions())
    in_rings = list(steps_of(table, problem, settings))
    seconds = [
        sum(homogeneous_seconds(step, table, problem) for step in in_rings),
        sum(step.makespan_seconds for step in in_rings),
        *(sum(step.makespan_seconds for step in steps_of(table, one, settings)) for one in (over_wave, apart)),
    ]
    cells = [f"{each:.2f} s" + (f" ({seconds[0] / each:.2f}x)" if at else "") for at, each in enumerate(seconds)]
    return f"| {name} | {_kind(frozen)} | {' | '.join(cells)}, {apart.encoder_ranks} of {problem.num_ranks} |"


def steps_of(table: LengthTable, problem: Problem, settings: BatchSettings) -> Iterator[StepPlan]:
    """Yield the steps as fcp plans them."""
    batches = GlobalBatches(table, problem, settings)
    solver = make_solver("fcp", batches)
    for batch in batches:
        yield plan_step(batch, problem, solver)


def homogeneous_seconds(step: StepPlan, table: LengthTable, problem: Problem) -> float:
    """Return the step's seconds if every rank of a ring encodes all of its pack."""
    profile = problem.profile
    text = step_prices(step, problem, profile=profile, manifest=without_pictures(table)).seconds
    encoder = np.zeros(len(step))
    owner = np.repeat(np.arange(len(step)), np.diff(step.sequence_offsets))
    np.add.at(encoder, owner, vision_seconds(planned_sequences(step, table), profile))
    waves = range(int(step.wave.max()) + 1)
    lasts = [encoder[step.wave == wave].max() + text[step.wave == wave].max() for wave in waves]
    return float(sum(lasts)) + profile.step.closing_seconds("microbatch")


def clip_text(profile: CostProfile) -> str:
    """Return the seconds of one clip on one ring: frames encoded by every rank, and shared out."""
    pairs = _CLIP_FRAMES // 2
    clip = LengthTable(
        name="clip",
        length_tokens=np.array([pairs * (_PAIR_PATCHES // 4 + 8)]),
        vision_patches=np.array([pairs * _PAIR_PATCHES]),
        vision_patch_pairs=np.array([pairs * _PAIR_PATCHES**2]),
    )
    encoder = float(vision_seconds(clip, profile)[0])
    work = sequence_work(without_pictures(clip), profile)
    text = float(
        group_seconds(
            profile,
            work,
            degree=_CLIP_RANKS,
            crosses_nodes=False,
        )[0]
    )
    alone, shared = text + encoder, text + encoder / _CLIP_RANKS
    return f"{alone:.2f} s | {shared:.2f} s ({alone / shared:.2f}x) |"


if __name__ == "__main__":
    main()
