"""The memory model against the memory that the bundled trainer takes, on one rank of a job of fake devices.

    python -m benchmarks.fake_devices                        # the whole table: an hour on one core
    python -m benchmarks.fake_devices --models qwen3-tiny    # seconds a row
    python -m benchmarks.fake_devices --models qwen3-8b --zero 2 --tokens 16384
    python -m benchmarks.fake_devices --defaults             # the default plan of every model on every large cluster

Each row builds the whole model as the trainer does, shards it, and runs the second of two steps, of two micro-batches
in rings of two ranks, on tensors that have shapes but no memory. `tracked` is the most that was alive at once,
`estimate` what `rank_memory` says without the links between devices, which are no tensors, and without visual tokens,
since the sequences are text. With `--recompute as-needed` the levels are those of a device of `--capacity` bytes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.fake_rank import FakeJob, tracked_step
from fcp_cli.cost.profile import CostProfile, dump_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.memory.fitting import LEAST_TOKENS, JobRanks, fitting_recipe
from fcp_cli.memory.items import RESERVE_FRACTION, RankMemory
from fcp_cli.memory.rank import as_needed_bytes, rank_memory
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model, shipped_names
from fcp_cli.plan.metadata import Sync
from fcp_cli.profiling.computed import analytic_profile, as_needed_profile

MODELS = ("qwen3-8b", "qwen3-vl-8b", "llama3-8b", "internvl3-8b", "qwen3-tiny", "qwen3-vl-tiny")
CLUSTERS = ("h100-8x8", "a100-8x8", "ascend910b-8x8", "h200-8x8")
UNTRACKED = ("communicators", "visual tokens", "encoder block")
STAGES: tuple[tuple[int, Sync, str], ...] = (
    (0, "iteration", "wave"),
    (1, "iteration", "wave"),
    (2, "iteration", "wave"),
    (2, "microbatch", "wave"),
    (3, "microbatch", "wave"),
    (3, "microbatch", "step"),
)


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument("--zero", default="0,1,2,3", help="ZeRO stages")
    parser.add_argument("--recompute", default="none,selective,full")
    parser.add_argument("--loss", default="plain,chunked")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--tokens", default="4096,16384", help="of a rank in each micro-batch")
    parser.add_argument("--ranks", default="8,64")
    parser.add_argument(
        "--capacity", type=float, default=73.6e9, help="bytes that a rank may use, of --recompute as-needed"
    )
    parser.add_argument("--defaults", action="store_true", help="the default recipes of all models instead")
    parser.add_argument("--track", default="", help="with --defaults: models whose memory is tracked, too")
    options = parser.parse_args()
    if options.defaults:
        print_defaults(options.track.split(","))
    else:
        print_table(jobs(options))


def jobs(options: Any) -> Iterator[FakeJob]:
    """Yield every combination that was asked for, stage 3 both with gradients summed in waves and once a step."""
    values = [getattr(options, name).split(",") for name in ("models", "ranks", "tokens", "recompute", "loss")]
    stages = [stage for stage in STAGES if str(stage[0]) in options.zero.split(",")]
    for (model, ranks, tokens, recompute, loss), (stage, sync, reduce), precision in itertools.product(
        itertools.product(*values), stages, options.precision.split(",")
    ):
        settings: dict[str, Any] = {"recompute": recompute, "loss": loss, "reduce": reduce, "precision": precision}
        recipe = Recipe(zero_stage=stage, **settings)
        on_cpu = precision in ("fp32", "fp64")  # of which an accelerator has no fused attention
        job = FakeJob(model=model, recipe=recipe, sync=sync, tokens=int(tokens), ranks=int(ranks), on_cpu=on_cpu)
        yield with_levels(job, capacity_bytes=options.capacity) if recompute == "as-needed" else job


def with_levels(job: FakeJob, *, capacity_bytes: float) -> FakeJob:
    """Return a job whose layers recompute as needed on devices of which a rank may use so many bytes."""
    spec, cluster = load_model(job.model), load_cluster("h100-8x8")
    place = JobRanks(
        num_ranks=job.ranks,
        ranks_per_node=min(8, job.ranks),
        capacity_bytes=capacity_bytes,
        on_cpu=job.on_cpu,
        most_peers=0,
    )
    fit = place.fit(spec, job.recipe, job.sync)

    def profile_of(recipe: Recipe) -> CostProfile:
        return analytic_profile(spec, cluster, recipe=recipe, sync=job.sync, ranks=job.ranks)

    profile = as_needed_profile(job.recipe, fit.level_tokens, profile_of)
    return replace(job, cost_profile=dump_cost_profile(profile))


def estimate(job: FakeJob) -> RankMemory:
    """Return the memory of a rank whose layers all recompute alike."""
    memory = rank_memory(load_model(job.model), job.recipe, sync=job.sync, ranks=job.ranks, on_cpu=job.on_cpu)
    return memory.without(*UNTRACKED)


def estimated_bytes(job: FakeJob) -> float:
    """Return the peak by the memory model."""
    if not job.cost_profile:
        return estimate(job).total_bytes(job.tokens)
    levels = parse_cost_profile(job.cost_profile, name="levels").recompute_levels
    spec = load_model(job.model)
    return as_needed_bytes(spec, job.recipe, levels, job.tokens, lambda one: estimate(replace(job, recipe=one)))


def print_table(rows: Iterator[FakeJob]) -> None:
    """Track and estimate job by job."""
    print("| model | ranks | tokens | recipe | sync | tracked | estimate | error | peak |")
    print("|---|---:|---:|---|---|---:|---:|---:|---|")
    errors = []
    for job in rows:
        tracked = tracked_step(job).peak_bytes
        expected = estimated_bytes(job)
        errors.append(abs(expected / tracked - 1))
        once = ", gradients summed once a step" if job.recipe.zero_stage == 3 and job.recipe.reduce == "step" else ""
        cells = [job.model, str(job.ranks), f"{job.tokens:,}", job.recipe.describe() + once, job.sync]
        cells += [f"{tracked / 1e9:.3f} GB", f"{expected / 1e9:.3f} GB", f"{expected / tracked - 1:+.1%}"]
        print(f"| {' | '.join((*cells, estimate(job).peak(job.tokens).name))} |", flush=True)
    print(f"\n{len(errors)} rows, largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")


def print_defaults(tracked: Sequence[str]) -> None:
    """Print the default recipe of each model on each cluster, what it leaves, and whether its peak fits."""
    print("| model | cluster | recipe | sync | tokens | estimate | tracked | may use |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    names = [name for name in shipped_names("model") if not name.endswith("-tiny")]
    for name, where in itertools.product(names, CLUSTERS):
        cluster = load_cluster(where)
        place = JobRanks(
            num_ranks=cluster.num_devices,
            ranks_per_node=cluster.devices_per_node,
            capacity_bytes=cluster.memory_bytes * (1 - RESERVE_FRACTION),
        )
        fit = fitting_recipe(load_model(name), RecipeRequest(), place)
        peak = _tracked(name, fit.recipe, fit.sync, fit.tokens, place) if name in tracked and fit.tokens else "-"
        tokens = f"{fit.tokens:,}" if fit.is_enough else f"{fit.tokens:,} of {LEAST_TOKENS:,}"
        estimate = f"{fit.memory.total_bytes(fit.tokens) / 1e9:.1f} GB"
        room = f"{place.capacity_bytes / 1e9:.1f} GB"
        print(f"| {name} | {where} | {fit.recipe.describe()} | {fit.sync} | {tokens} | {estimate} | {peak} | {room} |")


def _tracked(name: str, recipe: Recipe, sync: Sync, tokens: int, place: JobRanks) -> str:
    """Return the tracked peak, with what cannot be tracked as it is estimated."""
    tokens -= tokens % 8
    job = FakeJob(model=name, recipe=recipe, sync=sync, tokens=tokens, ranks=place.num_ranks)
    found = place.memory(load_model(name), recipe, sync)
    untracked = found.total_bytes(tokens) - found.without(*UNTRACKED).total_bytes(tokens)
    return f"{(tracked_step(job).peak_bytes + untracked) / 1e9:.1f} GB"


if __name__ == "__main__":
    main()
