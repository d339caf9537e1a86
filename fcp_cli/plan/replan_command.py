"""The `fcp plan` command of a plan, rebuilt from its metadata for error messages that suggest replanning."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import chain, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError
from fcp_cli.plan.metadata import PlanMetadata

if TYPE_CHECKING:
    from fcp_cli.cost.profile import CostProfile

_DEFAULTS: Final = {
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "epochs"), 1),
    "seed": 0,
    "overlong": "error",
    "last_batch": "keep",
    "solver": "fcp",
}


def plan_again(
    metadata: PlanMetadata,
    plan: Path,
    *,
    ranks: int | None = None,
    model: str | None = None,
    recipe: Recipe | None = None,
    changes: Sequence[str] = (),
    manifest: str | None = None,
    given_model: str | None = None,
) -> str:
    """Return the full command that makes an equivalent plan in a new file.

    Args:
        plan: file of the plan, which the command does not overwrite.
        ranks: number of ranks if not the plan's; caps ranks per node and drops the rank speeds.
        model: model if not the cost profile's; token budget, sync and recipe are then left to `fcp plan`.
        recipe: recipe if not the plan's.
        changes: command-line words of further options, which override the plan's.
        manifest: manifest if not the plan's.
        given_model: --model of the failed command, tried first as the location of the plan's own model.
    """
    name = _another(plan, "" if ranks in (None, metadata.num_ranks) else f"-{ranks}-ranks")
    wanted = ranks or metadata.num_ranks
    if metadata.continues is not None:  # batches and settings come from the run's folder
        words = ["fcp", "plan", "--continue-from", "RUN", "--ranks", str(wanted), *changes, "-o", str(name)]
        return shlex.join(words)
    profile = _profile_of(metadata)
    recipe = None if model is not None else recipe or metadata.recipe
    options = [
        *_basis(profile, model or _own_model(profile, plan, given_model), is_other=model is not None),
        *_plain(metadata, profile, wanted, is_same_model=model is None),
        *(_recipe(recipe, wanted) if recipe is not None else ()),
        *_mixed(metadata),
    ]
    replaced = {word for word in changes if word.startswith("--")}
    kept = [word for option in options if option[0] not in replaced for word in option]
    named = [] if metadata.mixture is not None else [manifest or _own_manifest(metadata, plan)]  # --mix names them
    words = ["fcp", "plan", *named, *kept, *changes, "-o", str(name)]
    return shlex.join(words)


def _another(plan: Path, ending: str) -> Path:
    """Return an unused file name derived from the plan's."""
    endings = chain((ending,), (f"{ending}-{number}" for number in count(2)))
    names = (plan.with_name(f"{plan.stem}{one}{plan.suffix}") for one in endings)
    return next(name for name in names if name != plan and not name.exists())


def _profile_of(metadata: PlanMetadata) -> CostProfile | None:
    from fcp_cli.cost.profile import parse_cost_profile  # lazy: ranks import this module but need no cost model

    try:
        return parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
    except ProfileError:
        return None


def _own_manifest(metadata: PlanMetadata, plan: Path) -> str:
    """Return the path of the plan's manifest next to the plan if it exists there, else its bare name."""
    beside = plan.parent / metadata.manifest.name
    return str(beside) if beside.exists() else metadata.manifest.argument


def _own_model(profile: CostProfile | None, plan: Path, given: str | None) -> str:
    """Return a --model argument that resolves to the plan's model, of which the plan stores only the name."""
    from fcp_cli.models.model import known_model

    if profile is None:
        return ""
    places = filter(None, (given, profile.model, str(plan.parent / profile.model)))
    names = ((place, known_model(place)) for place in places)
    found = (place for place, spec in names if spec is not None and spec.name == profile.model)
    return next(found, f"PATH/TO/{profile.model}")


def _basis(profile: CostProfile | None, model: str, *, is_other: bool) -> Iterator[list[str]]:
    if profile is not None and profile.origin == "analytic":
        yield ["--model", model]
        yield ["--cluster", profile.cluster]
    elif is_other:
        yield ["--model", model]
    elif (
        profile is not None
    ):  # a placeholder: the plan does not store the file name, and no profile means another model
        yield ["--profile", "profile.yaml"]


def _plain(
    metadata: PlanMetadata, profile: CostProfile | None, ranks: int, *, is_same_model: bool
) -> Iterator[list[str]]:
    """Yield the single-value options that differ from their defaults."""
    batching, overlong = metadata.batching, metadata.overlong
    by_tokens = None if batching is None else batching.tokens
    is_derived = profile is not None and profile.memory.tokens_per_rank() == metadata.tokens_per_rank
    speeds = metadata.rank_speeds or {} if ranks == metadata.num_ranks else {}
    values = {
        "ranks": ranks,
        "ranks_per_node": min(metadata.ranks_per_node, ranks),
        "tensor_parallel": metadata.tensor_parallel,
        "pipeline_parallel": metadata.pipeline_parallel,
        "virtual_stages": metadata.virtual_stages if metadata.pipeline_parallel > 1 else None,
        "tokens_per_rank": metadata.tokens_per_rank if is_same_model and not is_derived else None,
        "rank_speeds": ",".join(f"{rank}={speed:g}" for rank, speed in speeds.items()) or None,
        "sync": metadata.sync if is_same_model else None,
        "global_batch_tokens": by_tokens,
        "global_batch_size": None if by_tokens is not None else metadata.global_batch_size,
        "steps": metadata.step_limit,
        "epochs": metadata.epochs,
        "seed": metadata.seed,
        "no_shuffle": not metadata.shuffle,
        "max_length": overlong.max_length,
        "overlong": overlong.policy,
        "last_batch": metadata.last_batch,
        "solver": metadata.solver,
        "attention": metadata.attention,
        **(metadata.solver_options if metadata.solver == "fcp" else {}),
        "padded_rings": metadata.padding_multiple is not None,
        "phase": metadata.phase,
        "encoder_balance": metadata.encoder_balance,
        "encoder_ranks": metadata.encoder_ranks,
    }
    for name, value in values.items():
        if value not in (None, False, _DEFAULTS.get(name)):
            yield [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]


def _recipe(recipe: Recipe, ranks: int) -> Iterator[list[str]]:
    words = recipe.flags()
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise((*starts, len(words))):
        if words[start] != "--shard-ranks" or ranks % int(words[start + 1]) == 0:
            yield words[start:end]


def _mixed(metadata: PlanMetadata) -> Iterator[list[str]]:
    if (mixture := metadata.mixture) is None:
        return
    for stage in mixture.stages:
        for source, weight in zip(mixture.sources, stage.weights, strict=True):
            yield ["--mix", f"{source.name}:{weight:g}" + (f"@{stage.first_step}" if stage.first_step else "")]
