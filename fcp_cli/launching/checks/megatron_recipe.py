"""Checks that a Megatron script's arguments match the recipe for which its plan was priced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fcp_cli.launching.checks.finding import LaunchFinding, error, warning
from fcp_cli.launching.checks.software import is_megatrons_own, is_of_megatron, script_name
from fcp_cli.launching.job.job import Job, argument
from fcp_cli.machine.facts import Facts
from fcp_cli.plan.metadata.again import plan_again
from fcp_cli.recipe import Recipe

_STRATEGIES: Final = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # of Megatron-FSDP, by ZeRO stage
_FSDP: Final = "--use-megatron-fsdp --data-parallel-sharding-strategy"
_SHARDING: Final = ("", "--use-distributed-optimizer", f"{_FSDP} optim_grads", f"{_FSDP} optim_grads_params")
_FULL: Final = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SELECTIVE: Final = "--recompute-granularity selective --recompute-modules layernorm mlp"
_PLANNED: Final = {"none": "no recomputation", "full": "full recomputation of each layer"}
_RECOMPUTATION: Final = {"none": "", "as-needed": "", "full": _FULL, "selective": _SELECTIVE}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """A setting in which the script differs from its plan.

    Attributes:
        found, planned: descriptions of the script's and the plan's setting, for messages.
        added, dropped: arguments to add or drop so that the script matches the plan; both "" if there are none.
        setting: `Recipe` field and value with which a plan would match the script; None if no plan can, in which case
            `added` or `dropped` is set.
    """

    found: str
    planned: str
    added: str = ""
    dropped: str = ""
    setting: tuple[str, Any] | None = None


def recipe_arguments(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check a Megatron script's arguments against the plan's recipe.

    Megatron's defaults apply to missing arguments of its own scripts only; other scripts may set them in code.
    """
    recipe, words = job.metadata.recipe, job.arguments
    if recipe is None or not is_of_megatron(job):
        return
    granularity = _granularity(words)
    if recipe.recompute == "as-needed" and granularity is not None:
        yield error(
            f"{job.plan} recomputes layers as needed, but the script recomputes them by itself; "
            f"remove --recompute-granularity {granularity}"
        )
        recipe = replace(recipe, recompute="none")
        words = tuple(word for word in words if not word.startswith("--recompute"))
    is_whole = is_megatrons_own(job)
    found = [*_sharding(recipe, words, is_whole), *_recomputation(recipe, words, is_whole)]
    found += [*_precision(recipe, words, is_whole), *_loss(recipe, words, is_whole), *_offload(recipe, words)]
    if found:
        has = ", ".join(one.found for one in found)
        planned = ", ".join(one.planned for one in found)
        yield warning(
            f"{script_name(job)} has {has}, but {job.plan} was made for {planned}: memory and times may be "
            f"others than planned; {_remedy(job, found)}"
        )


def _sharding(recipe: Recipe, words: Sequence[str], is_whole: bool) -> Iterator[_Difference]:
    stage: int | None = None
    if "--use-megatron-fsdp" in words:
        strategy = argument(words, "--data-parallel-sharding-strategy") or "no_shard"
        stage = _STRATEGIES.index(strategy) if strategy in _STRATEGIES else None
    elif "--use-distributed-optimizer" in words or is_whole:
        stage = int("--use-distributed-optimizer" in words)
    planned = recipe.zero_stage
    if stage is None or stage == planned:
        return
    given = [flag for flag in ("--use-megatron-fsdp", "--use-distributed-optimizer") if flag in words]
    dropped = " ".join(flag for flag in given if planned < 2 and flag not in _SHARDING[planned])
    yield _Difference(
        found=f"ZeRO-{stage}",
        planned=f"ZeRO-{planned}",
        added=_SHARDING[planned],
        dropped=dropped,
        setting=("zero_stage", stage),
    )


def _granularity(words: Sequence[str]) -> str | None:
    # As in Megatron, --recompute-activations overrides --recompute-granularity.
    return "selective" if "--recompute-activations" in words else argument(words, "--recompute-granularity")


def _recomputation(recipe: Recipe, words: Sequence[str], is_whole: bool) -> Iterator[_Difference]:
    level = _level(words)
    planned = recipe.recompute
    wanted = "none" if planned == "as-needed" else planned
    if level == wanted or (level == "none" and not is_whole):
        return
    is_known = level in _RECOMPUTATION
    yield _Difference(
        found="no recomputation" if level == "none" else f"{level} recomputation" if is_known else level,
        planned=_PLANNED.get(planned, f"{planned} recomputation"),
        added=_RECOMPUTATION.get(planned, ""),
        dropped=f"--recompute-granularity {_granularity(words)}" if wanted == "none" else "",
        # Megatron has no equivalent of fcp's other levels, so suggest a plan without recomputation.
        setting=("recompute", level if is_known else "none") if is_known or planned not in _RECOMPUTATION else None,
    )


def _level(words: Sequence[str]) -> str:
    """Return the recomputation level of `Recipe` that the arguments select, or a description if no level matches."""
    granularity = _granularity(words)
    if granularity is None:
        return "none"
    if granularity == "selective":
        modules = _values(words, "--recompute-modules") or ["core_attn"]
        is_like_ours = "layernorm" in modules and not {"mlp", "moe"}.isdisjoint(modules)
        return "selective" if is_like_ours else f"recomputation of {' and '.join(modules)} alone"
    method, layers = (argument(words, f"--recompute-{name}") for name in ("method", "num-layers"))
    if (granularity, method, layers) == ("full", "uniform", "1"):
        return "full"
    return f"{granularity} recomputation with --recompute-method {method} and --recompute-num-layers {layers}"


def _values(words: Sequence[str], flag: str) -> list[str]:
    """Return the values of `--flag A B ...` or `--flag=A` among a script's arguments."""
    if (first := argument(words, flag)) is None:
        return []
    if flag not in words:
        return [first]
    rest = words[len(words) - list(reversed(words)).index(flag) :]
    end = next((place for place, word in enumerate(rest) if word.startswith("--")), len(rest))
    return list(rest[:end])


def _precision(recipe: Recipe, words: Sequence[str], is_whole: bool) -> Iterator[_Difference]:
    flag = next((flag for flag in ("--bf16", "--fp16") if flag in words), None)
    found = "fp32" if flag is None else "bf16"  # fp16 takes the same bytes
    if found != recipe.precision and (flag is not None or is_whole):
        yield _Difference(
            found="fp32" if flag is None else flag[2:],
            planned=recipe.precision,
            added="--bf16" if recipe.precision == "bf16" else "",
            dropped=flag or "" if recipe.precision == "fp32" else "",
            setting=("precision", found),
        )


def _loss(recipe: Recipe, words: Sequence[str], is_whole: bool) -> Iterator[_Difference]:
    # Newer versions have a fused loss that never materializes the logits.
    if recipe.loss == "chunked" and is_whole and argument(words, "--cross-entropy-fusion-impl") != "linear":
        yield _Difference(found="plain loss", planned="chunked loss", setting=("loss", "plain"))


def _offload(recipe: Recipe, words: Sequence[str]) -> Iterator[_Difference]:
    if "--optimizer-cpu-offload" in words:
        yield _Difference(
            found="an offloaded optimizer", planned="an optimizer on the device", dropped="--optimizer-cpu-offload"
        )
    if "--cpu-offloading" in words and recipe.offload == "none":
        yield _Difference(
            found="offloaded activations", planned="activations on the device", dropped="--cpu-offloading"
        )


def _remedy(job: Job, found: Sequence[_Difference]) -> str:
    """Return the argument changes that match the script to the plan, and a `fcp plan` command for the rest."""
    by_script = [one for one in found if one.added or one.dropped]
    by_plan = [one for one in found if one not in by_script]
    if by_plan:
        return ", and ".join(filter(None, (_changed_script(by_script), _changed_plan(job, by_plan))))
    is_plannable = all(one.setting is not None for one in found)
    return _changed_script(found) + (f", or {_changed_plan(job, found)}" if is_plannable else "")


def _changed_script(found: Sequence[_Difference]) -> str:
    added = " ".join(one.added for one in found if one.added)
    dropped = " and ".join(one.dropped for one in found if one.dropped)
    steps = ([f"give it {added}"] if added else []) + ([f"remove {dropped}"] if dropped else [])
    return " and ".join(steps)


def _changed_plan(job: Job, found: Sequence[_Difference]) -> str:
    assert job.metadata.recipe is not None
    settings = dict(one.setting for one in found if one.setting is not None)
    # ZeRO-3 gathers weights over all ranks in every micro-batch.
    changes = ["--sync", "microbatch"] if settings.get("zero_stage") == 3 else []
    recipe = replace(job.metadata.recipe, **settings)
    return f"plan with: {plan_again(job.metadata, job.plan, recipe=recipe, changes=changes, given_model=job.model)}"
