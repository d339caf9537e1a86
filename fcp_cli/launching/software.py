"""Checks installed packages, their versions, and a script's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from fcp_cli.cost.recipe import Recipe
from fcp_cli.launching.commands import interpreter_name
from fcp_cli.launching.job import Job, argument
from fcp_cli.launching.program import without_entry
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.util.findings import Finding
from fcp_cli.util.machine import Facts
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.words import counted

_LEAST_TORCH = (2, 7)
_LEAST_TRANSFORMERS = (5, 3)
PARALLEL_ARGUMENTS: Final = {
    "--tensor-model-parallel-size": "tensor_parallel",
    "--pipeline-model-parallel-size": "pipeline_parallel",
    "--num-virtual-stages-per-pipeline-rank": "virtual_stages",
}
"""Megatron's argument -> field of the plan's metadata that it must equal."""
_LAYERS_PER_BLOCK = "--num-layers-per-virtual-pipeline-stage"
# Flags that make Megatron count the embedding or the loss as a layer.
_COUNTED_AS_LAYERS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
# Arguments that identify a Megatron script: elsewhere, --global-batch-size may mean something else.
_OF_MEGATRON = (
    *PARALLEL_ARGUMENTS,
    "--micro-batch-size",
    "--recompute-granularity",
    "--train-iters",
    "--transformer-impl",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
)
_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def error(message: str) -> Finding:
    """Create a finding that stops the launch."""
    return Finding(name="launch", passed=False, lines=(message,))


def warning(message: str) -> Finding:
    """Create a finding that is printed without stopping the launch."""
    return Finding(name="launch", passed=None, lines=(message,))


def number(facts: Facts, name: str) -> float | None:
    """Return the value of a numeric environment variable, or None if it is unset or not a number."""
    try:
        return float(facts.variables[name])
    except (KeyError, ValueError):
        return None


def cann(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that CANN's set_env.sh was sourced, without which its libraries are not found."""
    if job.stack != "npu" or job.node_rank is None:
        return
    if facts.cann_home is None:
        yield error(f"ASCEND_HOME_PATH is not set: CANN was not sourced; run: {_SET_ENV}")
    elif not facts.has_hccl:
        yield error(f"libhccl.so is not found though ASCEND_HOME_PATH is {facts.cann_home}; run: {_SET_ENV}")


def torch_versions(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that torch is recent enough, and that torch_npu matches it."""
    if job.node_rank is None:
        return
    torch, torch_npu = facts.packages.get("torch"), facts.packages.get("torch-npu")
    if torch is not None and _release(torch) < _LEAST_TORCH:
        yield error(f"torch {torch} is too old; fcp needs 2.7 or newer: pip install 'torch>=2.7'")
    if torch is not None and torch_npu is not None and _release(torch)[:3] != _release(torch_npu)[:3]:
        wanted = ".".join(map(str, _release(torch)[:3]))
        yield error(f"torch_npu {torch_npu} is not made for torch {torch}; run: pip install 'torch_npu=={wanted}.*'")
    if torch is not None and torch_npu is None and job.stack == "npu" and job.needs_torch:
        yield error(f"torch_npu is not installed; run: {pip_install('npu')}")


def transformers_version(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that transformers is recent enough for the bundled trainer."""
    found = facts.packages.get("transformers")
    if job.is_bundled and job.node_rank is not None and found is not None and _release(found) < _LEAST_TRANSFORMERS:
        yield error(f"transformers {found} is too old for the bundled trainer; run: pip install 'transformers>=5.3'")


def msrun(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that msrun exists and runs this Python; it uses the first `python` on PATH."""
    if job.launcher != "msrun" or job.node_rank is None:
        return
    if facts.programs.get("msrun") is None:
        yield error(
            f"msrun is neither next to this Python nor on PATH; it comes with MindSpore: {pip_install('mindspore')}"
        )
    name = interpreter_name(facts.python)
    python = facts.programs.get(name)
    # Compare folders, not link targets: a link in another environment starts that environment.
    if python is None or Path(python).absolute().parent != Path(facts.python).absolute().parent:
        yield error(
            f"msrun runs the {name} of PATH, which is {python or 'missing'}, not {facts.python}; run fcp from an "
            f"environment whose folder has a {name}: python3 -m venv makes one"
        )


_Given: TypeAlias = Mapping[str, Any]
"""A script's options: numbers as int, others as text; None if missing. With `planned` and `plan` for the sentences."""

_EVERY_SCRIPT: Final[tuple[tuple[Callable[[_Given], bool], str], ...]] = (
    *(
        (
            lambda given, flag=flag, key=key: given[flag] not in (None, getattr(given["planned"], key)),
            f"the script has {flag} {{given[{flag}]}}, but {{plan}} was made for {{planned.{key}}}; plan with "
            f"--{key.replace('_', '-')} {{given[{flag}]}}, or launch the script with the plan's",
        )
        for flag, key in PARALLEL_ARGUMENTS.items()
    ),
    (
        lambda given: given["--context-parallel-algo"] not in (None, "megatron_cp_algo"),
        "--context-parallel-algo {given[--context-parallel-algo]} keeps the groups of its start, so no plan can change "
        "them; use megatron_cp_algo",
    ),
)
"""(Condition, sentence): arguments with which a script trains wrong, or fails with words that do not say why."""
_MEGATRON_SCRIPT: Final[tuple[tuple[Callable[[_Given], bool], str], ...]] = (
    (
        lambda given: (
            given["--global-batch-size"] not in (None, given["planned"].global_batch_size)
            and given["planned"].has_equal_batches
        ),
        "the script has --global-batch-size {given[--global-batch-size]}, but {plan} was made for "
        "{planned.global_batch_size}; plan with --global-batch-size {given[--global-batch-size]}, or launch the script "
        "with the plan's",
    ),
    (
        lambda given: (given["--train-iters"] or 0) > given["planned"].end_step,
        "the script has --train-iters {given[--train-iters]}, but {plan} ends after {steps}; plan more with "
        "--epochs, or launch the script with --train-iters {planned.end_step}",
    ),
    (
        lambda given: given["--rampup-batch-size"] is not None,
        "--rampup-batch-size changes the global batch, which the plan has made; remove it",
    ),
    (
        lambda given: given["--dataloader-type"] == "cyclic",
        "--dataloader-type cyclic draws samples at random, and the plan names them; use single",
    ),
    (
        # MindSpeed's ring may have any size.
        lambda given: given["stack"] == "cuda" and (given["--context-parallel-size"] or 0) > 1,
        "the script has --context-parallel-size {given[--context-parallel-size]}, but the plan makes the groups; use "
        "--context-parallel-size 1",
    ),
    (
        lambda given: bool((given["--attention-dropout"] or "").strip("0.")),
        "--attention-dropout {given[--attention-dropout]} cannot be repeated by a ring; use --attention-dropout 0",
    ),
)
"""The same for Megatron's own arguments: elsewhere, the names may mean something else."""
_NUMBERS: Final = (*PARALLEL_ARGUMENTS, "--global-batch-size", "--train-iters", "--context-parallel-size")
_TEXTS: Final = ("--context-parallel-algo", "--rampup-batch-size", "--dataloader-type", "--attention-dropout")


def script_arguments(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check a script's Megatron and MindSpeed options against the plan.

    Missing arguments are reported for Megatron-LM's own script only, since others may set them in code.
    """
    given: dict[str, Any] = {flag: _number(argument(job.arguments, flag)) for flag in _NUMBERS}
    given |= {flag: argument(job.arguments, flag) for flag in _TEXTS}
    given |= {"planned": job.metadata, "stack": job.stack}
    of_plan = {"plan": job.plan, "planned": job.metadata, "steps": counted(job.metadata.end_step, "step")}
    table = (*_EVERY_SCRIPT, *(_MEGATRON_SCRIPT if is_of_megatron(job) else ()))
    yield from (error(text.format(given=given, **of_plan)) for is_wrong, text in table if is_wrong(given))
    yield from _layers_per_block(job)
    if is_megatrons_own(job):
        needed = [] if "--calculate-per-token-loss" in job.arguments else ["--calculate-per-token-loss"]
        needed += ["--attention-dropout 0"] if given["--attention-dropout"] is None else []
        if needed:
            yield warning(f"pretrain_gpt.py stops before its first step under a plan, unless given {' '.join(needed)}")


def script_name(job: Job) -> str:
    """Return the file name of a job's script, with or without the hooks' entry point before it."""
    return Path(next(iter(without_entry((*job.program, *job.arguments))), "")).name


def is_megatrons_own(job: Job) -> bool:
    """Return whether a job's script is Megatron-LM's own, so that Megatron's defaults apply."""
    return script_name(job) == "pretrain_gpt.py"


def is_of_megatron(job: Job) -> bool:
    """Return whether a job's script is known to be a Megatron script."""
    return is_megatrons_own(job) or any(argument(job.arguments, flag) is not None for flag in _OF_MEGATRON)


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdecimal() else None


def _layers_per_block(job: Job) -> Iterator[Finding]:
    """Check the virtual stages of a script that sets layers per virtual stage."""
    flags = (_LAYERS_PER_BLOCK, "--num-layers", "--pipeline-model-parallel-size")
    given, layers, stages = (_number(argument(job.arguments, flag)) for flag in flags)
    if not given or layers is None:
        return
    layers += sum(flag in job.arguments for flag in _COUNTED_AS_LAYERS)
    pipeline = job.metadata.pipeline_parallel if stages is None else stages
    made, rest = divmod(layers, max(pipeline, 1) * given)
    if rest == 0 and made != job.metadata.virtual_stages:
        yield error(
            f"the script has {_LAYERS_PER_BLOCK} {given}, which makes {made} virtual stages of the {layers} layers on "
            f"{pipeline} stages, but {job.plan} was made for {job.metadata.virtual_stages}; plan with --virtual-stages "
            f"{made}, or launch the script with the plan's"
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the numeric parts of a version: (2, 7, 1) for 2.7.1.post2+cpu."""
    found = re.match(r"\d+(?:\.\d+)*(?=[.+]|$)", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# Checks that a Megatron script's arguments match the recipe for which its plan was priced.

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


def recipe_arguments(job: Job, facts: Facts) -> Iterator[Finding]:
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
