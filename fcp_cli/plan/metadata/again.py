"""The `fcp plan` command of a plan, rebuilt from its metadata, for messages that suggest to plan again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from fcp_cli.errors import ProfileError
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.recipe import Recipe

if TYPE_CHECKING:
    from fcp_cli.cost.profile import CostProfile


def plan_again(
    metadata: PlanMetadata,
    plan: Path,
    *,
    ranks: int | None = None,
    model: str | None = None,
    recipe: Recipe | None = None,
    changes: Sequence[str] = (),
    manifest: str | None = None,
) -> str:
    """Return the whole command that makes a plan like this one, under a name of its own.

    Args:
        plan: its file, which the command does not replace.
        ranks: other ranks than the plan's; ranks per node and token budget are then worked out anew.
        model: another model than the cost profile's; its recipe is then worked out anew.
        recipe: another recipe than the plan's.
        changes: words for further options that differ; an option in them replaces the plan's.
        manifest: another manifest than the plan's.
    """
    name = _another(plan, "" if ranks in (None, metadata.num_ranks) else f"-{ranks}-ranks")
    if metadata.continues is not None:  # the run's batches and settings come from its folder
        wanted = str(ranks or metadata.num_ranks)
        return shlex.join(["fcp", "plan", "--continue-from", "RUN", "--ranks", wanted, *changes, "-o", str(name)])
    profile = _profile_of(metadata)
    options = [
        *_basis(profile, model),
        *_ranks(metadata, profile, ranks, is_same_model=model is None),
        *(_recipe(metadata, recipe or metadata.recipe, ranks or metadata.num_ranks) if model is None else ()),
        *_batches(metadata),
        *_solver(metadata),
    ]
    replaced = {word for word in changes if word.startswith("--")}
    kept = [word for option in options if option[0] not in replaced for word in option]
    named = [] if metadata.mixture is not None else [manifest or metadata.manifest.argument]  # --mix names them
    words = ["fcp", "plan", *named, *kept, *changes, "-o", str(name)]
    return shlex.join(words)


def _another(plan: Path, ending: str) -> Path:
    """Return a name near the plan's that no file has."""
    endings = chain((ending,), (f"{ending}-{number}" for number in count(2)))
    names = (plan.with_name(f"{plan.stem}{one}{plan.suffix}") for one in endings)
    return next(name for name in names if name != plan and not name.exists())


def _profile_of(metadata: PlanMetadata) -> CostProfile | None:
    from fcp_cli.cost.profile import parse_cost_profile  # of a failure alone: ranks need no cost model

    try:
        return parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
    except ProfileError:
        return None


def _basis(profile: CostProfile | None, model: str | None) -> Iterator[list[str]]:
    if profile is not None and profile.origin == "analytic":
        yield ["--model", model or profile.model]
        yield ["--cluster", profile.cluster]
    elif model is not None:
        yield ["--model", model]
    elif profile is not None:  # its file's name is not in the plan; without one fcp would plan for another model
        yield ["--profile", "profile.yaml"]


def _ranks(
    metadata: PlanMetadata, profile: CostProfile | None, ranks: int | None, *, is_same_model: bool
) -> Iterator[list[str]]:
    wanted = ranks or metadata.num_ranks
    yield ["--ranks", str(wanted)]
    yield ["--ranks-per-node", str(min(metadata.ranks_per_node, wanted))]
    if metadata.tensor_parallel > 1:
        yield ["--tensor-parallel", str(metadata.tensor_parallel)]
    if metadata.pipeline_parallel > 1:
        yield ["--pipeline-parallel", str(metadata.pipeline_parallel)]
    if metadata.virtual_stages > 1:
        yield ["--virtual-stages", str(metadata.virtual_stages)]
    is_derived = profile is not None and profile.memory.tokens_per_rank() == metadata.tokens_per_rank
    if is_same_model and not is_derived:
        yield ["--tokens-per-rank", str(metadata.tokens_per_rank)]
    if metadata.rank_speeds and wanted == metadata.num_ranks:
        yield ["--rank-speeds", ",".join(f"{rank}={speed:g}" for rank, speed in metadata.rank_speeds.items())]


def _recipe(metadata: PlanMetadata, recipe: Recipe | None, ranks: int) -> Iterator[list[str]]:
    yield ["--sync", metadata.sync]
    words = recipe.flags() if recipe is not None else []
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise((*starts, len(words))):
        if words[start] != "--shard-ranks" or ranks % int(words[start + 1]) == 0:
            yield words[start:end]


def _batches(metadata: PlanMetadata) -> Iterator[list[str]]:
    batching, overlong = metadata.batching, metadata.overlong
    if batching is not None and batching.tokens is not None:
        yield ["--global-batch-tokens", str(batching.tokens)]
    elif batching is not None and batching.by == "given":
        yield ["--step-column", "COLUMN"]  # the plan does not keep its name
    else:
        yield ["--global-batch-size", str(metadata.global_batch_size)]
    if (mixture := metadata.mixture) is not None:
        for stage in mixture.stages:
            for source, weight in zip(mixture.sources, stage.weights, strict=True):
                yield ["--mix", f"{source.name}:{weight:g}" + (f"@{stage.first_step}" if stage.first_step else "")]
    if metadata.step_limit is not None:
        yield ["--steps", str(metadata.step_limit)]
    if metadata.epochs > 1:
        yield ["--epochs", str(metadata.epochs)]
    if metadata.seed:
        yield ["--seed", str(metadata.seed)]
    if not metadata.shuffle:
        yield ["--no-shuffle"]
    if overlong.max_length is not None:
        yield ["--max-length", str(overlong.max_length)]
    if overlong.policy != "error":
        yield ["--overlong", overlong.policy]
    if metadata.last_batch != "keep":
        yield ["--last-batch", metadata.last_batch]


def _solver(metadata: PlanMetadata) -> Iterator[list[str]]:
    if metadata.solver != "fcp":
        yield ["--solver", metadata.solver]
    if metadata.attention is not None:
        yield ["--attention", metadata.attention]
    if metadata.solver == "fcp":
        for name in ("max_degree", "max_groups", "max_peers"):
            if name in metadata.solver_options:
                yield [f"--{name.replace('_', '-')}", str(metadata.solver_options[name])]
        if metadata.solver_options.get("robust"):
            yield ["--robust"]
    if metadata.padding_multiple is not None:
        yield ["--padded-rings"]
    if metadata.phase is not None:
        yield ["--phase", metadata.phase]
    if metadata.encoder_balance is not None:
        yield ["--encoder-balance", metadata.encoder_balance]
    if metadata.encoder_ranks is not None:
        yield ["--encoder-ranks", str(metadata.encoder_ranks)]
    if metadata.cached_from_step is not None:
        yield ["--embeddings-cached"]
