"""Checks that a rank fits into the memory of the actual device, and prints the memory table."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fcp_cli.cost.recipe import Recipe, RecipeRequest, flag_words, recipe_to_follow
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.launching.job import Job, is_assumed
from fcp_cli.launching.software import error, warning
from fcp_cli.memory.fitting import JobRanks, fitting_recipe, sharing_ranks
from fcp_cli.memory.items import RESERVE_FRACTION, RankMemory
from fcp_cli.memory.rank import as_needed_bytes, saved_bytes
from fcp_cli.models.model import ModelSpec, load_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.plan.rings import PeerCount
from fcp_cli.plan.setup import RankShape, held_tokens
from fcp_cli.training.settings import TrainSettings
from fcp_cli.util.console import new_table
from fcp_cli.util.findings import Finding
from fcp_cli.util.machine import Facts
from fcp_cli.util.validation import fields_of
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    from rich.table import Table

_LEAST_BYTES: Final = 5e6  # smaller items would round to 0.00 GB


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMemory:
    """Peak memory of a rank, and its limit.

    Attributes:
        spec, recipe: model and recipe of the job.
        rank: memory by item.
        tokens: token budget of the plan.
        holders: number of ranks that share the capacity: all ranks of a host, or 1.
        capacity_bytes: memory of a device or of the host; 0 if unknown.
        is_host: whether ranks run on CPUs.
        place: ranks and capacity, to compute the memory of other recipes.
        plan_tokens, plan_bytes: maximum tokens per rank and peak bytes over the plan's micro-batches; 0 if its rows
            were not read.
    """

    spec: ModelSpec
    recipe: Recipe
    rank: RankMemory
    tokens: int
    holders: int
    capacity_bytes: float
    is_host: bool
    place: JobRanks
    plan_tokens: int = 0
    plan_bytes: float = 0.0

    @property
    def items(self) -> dict[str, float]:
        """Peak bytes by item, of all ranks that share the capacity."""
        return {name: size * self.holders for name, size in self.rank.items(self.tokens).items()}

    @property
    def total_bytes(self) -> float:
        return self.rank.total_bytes(self.tokens) * self.holders

    def title(self) -> str:
        ranks = f"{self.holders} ranks on this host" if self.is_host else "a device"
        return f"{ranks}: {self.spec.name}, {self.tokens:,} tokens a rank, {self.recipe.describe()}"

    def document(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "model": self.spec.name,
            "recipe": self.recipe.describe(),
            "tokens_per_rank": self.tokens,
            "ranks": self.holders,
            "items_bytes": self.items,
            "total_bytes": self.total_bytes,
            "plan_tokens": self.plan_tokens or None,
            "plan_bytes": self.plan_bytes or None,
            "capacity_bytes": self.capacity_bytes or None,
        }


def job_memory(job: Job, facts: Facts) -> JobMemory | None:
    """Return the peak memory of a rank, or None if model or recipe is unknown.

    A script's model defaults to the plan's. On CPUs, where users try out plans with other models, it must be given with
    --model.
    """
    metadata, device = job.metadata, job.machine.device
    recipe = metadata.recipe
    if job.settings is not None:
        recipe = job.settings.recipe(metadata.recipe, sync=metadata.sync, device=device)
    name = job.model or (job.profile.model if job.profile is not None else None)
    is_host = device == "cpu"
    if recipe is None or name is None or (is_host and job.settings is None and job.model is None):
        return None
    try:
        spec = load_model(name)
    except ProfileError:
        return None
    holders = job.processes_per_node if is_host else 1
    capacity = float(job.machine.memory_bytes) if is_host else _device_bytes(job, facts)
    place = place_of(job, capacity_bytes=capacity * (1 - RESERVE_FRACTION) / holders)
    rank = place.memory(spec, recipe, metadata.sync)
    rank = rank if metadata.phase is None else rank.in_forward()
    _peers, held = _rows_of(job)
    return JobMemory(
        spec=spec,
        recipe=recipe,
        rank=rank,
        tokens=metadata.tokens_per_rank,
        holders=holders,
        capacity_bytes=capacity,
        is_host=is_host,
        place=place,
        plan_tokens=max(held, default=0),
        plan_bytes=_most_bytes(job, spec, recipe, place, rank, held),
    )


def _most_bytes(
    job: Job, spec: ModelSpec, recipe: Recipe, place: JobRanks, rank: RankMemory, held: frozenset[int]
) -> float:
    """Return the peak bytes over a plan's micro-batches; with as-needed recomputation, fewer tokens may need more."""
    if not held:
        return 0.0
    levels = () if job.profile is None or job.metadata.phase == "forward" else job.profile.recompute_levels
    if recipe.recompute != "as-needed" or not levels:
        return rank.total_bytes(max(held))
    memory_of = cache(partial(place.memory, spec, sync=job.metadata.sync))
    fullest = {max((one for one in held if one <= level.tokens), default=min(held)) for level in levels}
    return max(as_needed_bytes(spec, recipe, levels, one, memory_of) for one in (*fullest, max(held)))


def place_of(job: Job, *, capacity_bytes: float) -> JobRanks:
    """Return the ranks of a job and their limits, with the maximum number of peers in its plan."""
    metadata = job.metadata
    return JobRanks(
        **fields_of(RankShape, metadata),
        capacity_bytes=capacity_bytes,
        expert_parallel=1 if job.profile is None else job.profile.expert_parallel,
        on_cpu=job.machine.device == "cpu",
        most_peers=_rows_of(job)[0],
        sharing=sharing_ranks(metadata.attention, metadata),
    )


def _rows_of(job: Job) -> tuple[int | None, frozenset[int]]:
    """Return a plan's maximum peers per rank (None if its rows are not read), and the distinct token counts of ranks.

    CPU jobs skip reading: their plan may be for another model.
    """
    if job.machine.device == "cpu" or is_assumed(job.metadata) or not job.plan.is_file():
        return None, frozenset()
    return _read_rows(job.plan.absolute(), job.metadata.plan_hash)


@cache
def _read_rows(plan: Path, plan_hash: str) -> tuple[int | None, frozenset[int]]:
    reader = PlanReader(plan)
    metadata = reader.metadata
    peers, held = PeerCount(num_ranks=metadata.num_ranks, ranks_per_node=metadata.ranks_per_node), set[int]()
    for step in reader.steps():
        peers.add(step)
        held.update(np.unique(-(-held_tokens(step, metadata.padding_multiple) // step.degrees)).tolist())
    return peers.most, frozenset(held)


def _device_bytes(job: Job, facts: Facts) -> float:
    """Return the memory of a device: as detected, else from the plan's cost profile; 0 if unknown."""
    found = job.machine.device_memory_bytes or facts.device_memory_bytes
    if found or job.profile is None:
        return float(found)
    return job.profile.memory.capacity_bytes / (1 - RESERVE_FRACTION)


def rank_memory(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that a rank fits into memory.

    On CPUs, only the model state counts, not the token budget: users try out plans of large models with small ones.
    Scripts only get a warning, since they may differ from the plan's recipe.
    """
    need = job_memory(job, facts)
    if need is None or not need.capacity_bytes:
        return
    if need.is_host:
        least = need.rank.total_bytes(1) * need.holders
        if job.settings is not None and least > need.capacity_bytes:
            yield error(
                f"{need.spec.name} needs {least / 1e9:.0f} GB for weights, gradients and optimizer on {need.holders} "
                f"ranks, but this machine has {need.capacity_bytes / 1e9:.0f} GB; try --model qwen3-tiny, or launch on "
                "accelerators"
            )
        return
    if (need.plan_bytes or need.total_bytes) <= need.capacity_bytes:
        return
    yield (error if job.settings is not None else warning)(
        f"{job.plan} lets a rank hold {need.tokens:,} tokens, for which {need.spec.name} needs "
        f"{need.total_bytes / 1e9:.1f} GB under {need.recipe.describe()}, but a device has "
        f"{need.capacity_bytes / 1e9:.1f} GB; {_remedy(job, need)}"
    )


def host_copies(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that a node has memory for host copies of checkpoints, which stay allocated between saves.

    State on accelerators is always copied, state on CPUs only for background saves.
    """
    need, settings = job_memory(job, facts), job.settings
    host_bytes = float(job.machine.memory_bytes)
    if need is None or settings is None or not host_bytes or (need.is_host and not settings.async_save):
        return
    ranks = job.metadata.num_ranks
    savers = min(job.processes_per_node, need.recipe.shards(ranks) if need.recipe.zero_stage else 1)
    copies = savers * saved_bytes(need.spec, need.recipe, ranks=ranks)
    held = need.rank.total_bytes(1) * need.holders if need.is_host else 0.0
    if held > host_bytes or held + copies <= host_bytes:
        return
    other, remedy = "", "share a copy out over more nodes, without --shard-ranks"
    if need.is_host:
        other = f" in addition to the {held / 1e9:.0f} GB that they train with"
        remedy = "give --no-async-save, which writes while training waits"
    yield warning(
        f"checkpoints of {need.spec.name} are copied to the memory of this host, {copies / 1e9:.0f} GB for "
        f"{counted(savers, 'rank')}{other}, but it has {host_bytes / 1e9:.0f} GB; {remedy}"
    )


def _remedy(job: Job, need: JobMemory) -> str:
    """Return the `fcp plan` command for a plan that fits, for messages."""
    fit = fitting_recipe(need.spec, RecipeRequest.to_train_as(need.recipe), need.place, wanted_tokens=need.tokens)
    if fit.tokens < 1:
        return "no recipe fits: plan for more --ranks, or train a smaller --model"
    budget = [] if fit.is_enough else ["--tokens-per-rank", str(fit.tokens)]
    words = [*_model_words(job, need.spec), "--sync", fit.sync, *budget]
    return f"plan for it with: {plan_again(job.metadata, job.plan, recipe=fit.recipe, changes=words)}"


def _model_words(job: Job, spec: ModelSpec) -> list[str]:
    """Return `--model` if the plan is for another one; for analytic plans, always `--model` and `--cluster`."""
    planned, name = job.profile, job.model or spec.name
    if planned is None or planned.origin == "analytic":
        return ["--model", name, *(["--cluster", planned.cluster] if planned is not None else [])]
    return [] if planned.model == spec.name else ["--model", name]


def check_recipe_of_plan(job: Job, settings: TrainSettings) -> None:
    """Raise UsageError if the settings differ from the recipe for which the plan was priced."""
    metadata, device = job.metadata, job.machine.device
    if metadata.phase == "forward":
        raise UsageError(
            f"{job.plan} is of forward passes, which train nothing; plan without --phase forward, or launch a script "
            "that runs them: -- SCRIPT ARGS"
        )
    planned = recipe_to_follow(metadata.recipe, sync=metadata.sync, device=device)
    asked = settings.recipe(metadata.recipe, sync=metadata.sync, device=device)
    if metadata.recipe is None:
        return
    # CPUs ignore an accelerator plan's recipe, except for which weights are trained.
    is_followed = planned is metadata.recipe
    compared = [f.name for f in fields(Recipe)] if is_followed else ["freeze_vision", "lora", "freeze"]
    differing = [name for name in compared if getattr(asked, name) != getattr(planned, name)]
    if not differing:
        return
    if not is_followed:
        planned, asked = metadata.recipe, RecipeRequest.to_train_as(asked).applied_to(metadata.recipe)
    if settings.resume and (kept := {"freeze_vision", "lora", "freeze"}.intersection(differing)):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(kept))
        raise UsageError(
            f"{settings.run_dir} was planned for {planned.describe()}, and the trained weights cannot change within a "
            f"run; remove {flags}"
        )
    changed = [words for name in differing if (words := flag_words(name, getattr(asked, name)))]
    need = job_memory(job, Facts())
    needs = ""
    if need is not None and is_followed:
        of = f" of {need.capacity_bytes / 1e9:.1f} GB" if need.capacity_bytes else " GB"
        needs = f", which needs {need.total_bytes / 1e9:.1f}{of} for {need.tokens:,} tokens a rank"
    if settings.resume:
        ranks = str(metadata.num_ranks)
        words = ["--continue-from", str(settings.run_dir), "--ranks", ranks, *chain(*changed)]
        again = shlex.join(["fcp", "plan", *words])
    else:
        model = _model_words(job, need.spec) if need is not None else []
        again = plan_again(metadata, job.plan, recipe=asked, changes=model)
    raise UsageError(
        f"{job.plan} was priced for {planned.describe()}, not for {', '.join(map(shlex.join, changed))}{needs}; "
        f"remove {'it' if len(changed) == 1 else 'them'}, or plan with: {again}"
    )


def memory_table(need: JobMemory) -> Table:
    """Return the memory table, largest items first."""
    capacity = need.capacity_bytes
    table = new_table("item", "GB", "share" if capacity else "")
    seen = [(name, size) for name, size in need.items.items() if size >= _LEAST_BYTES]
    rows = [*seen, ("in all", need.total_bytes)]
    if need.plan_tokens:
        rows.append((f"at most in this plan, of up to {need.plan_tokens:,} tokens", need.plan_bytes))
    for name, size in rows:
        share = size / capacity if capacity else None
        shown = "" if share is None else f"{share:.1%}" if share <= 1 else f"{share:.1f}x"
        table.add_row(name, f"{size / 1e9:.2f}", shown)
    where = "the host" if need.is_host else "a device"
    table.add_row(f"of {where}", f"{capacity / 1e9:.2f}" if capacity else "unknown", "")
    return table
