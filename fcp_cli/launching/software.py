"""Checks installed packages, their versions, and a script's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.cost.recipe import Recipe
from fcp_cli.launching.commands import interpreter_name, without_entry
from fcp_cli.launching.job import Job, argument
from fcp_cli.plan.replan_command import plan_again
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


def cann(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that CANN's set_env.sh was sourced, without which its libraries are not found."""
    if job.stack != "npu" or job.node_rank is None:
        return
    if facts.cann_home is None:
        yield error(f"ASCEND_HOME_PATH is not set: CANN was not sourced; run: {_SET_ENV}")
    elif not facts.has_hccl:
        yield error(f"libhccl.so is not found though ASCEND_HOME_PATH is {facts.cann_home}; run: {_SET_ENV}")


def torch_versions(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
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


def transformers_version(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that transformers is recent enough for the bundled trainer."""
    found = facts.packages.get("transformers")
    if job.is_bundled and job.node_rank is not None and found is not None and _release(found) < _LEAST_TRANSFORMERS:
        yield error(f"transformers {found} is too old for the bundled trainer; run: pip install 'transformers>=5.3'")


def msrun(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
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


def pdsh(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check for pdsh: MindSpeed-MM's own multi-node start hangs without it."""
    if job.stack == "npu" and job.num_nodes > 1 and not job.is_bundled and facts.programs.get("pdsh") is None:
        yield warning("pdsh is not installed, and MindSpeed-MM hangs without it on several nodes; install pdsh")


def script_arguments(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check a script's Megatron and MindSpeed options against the plan."""
    for flag, key in PARALLEL_ARGUMENTS.items():
        given, planned = _number(argument(job.arguments, flag)), getattr(job.metadata, key)
        if given is not None and given != planned:
            yield error(
                f"the script has {flag} {given}, but {job.plan} was made for {planned}; plan with "
                f"--{key.replace('_', '-')} {given}, or launch the script with the plan's"
            )
    yield from _layers_per_block(job)
    yield from _megatron_arguments(job)
    algorithm = argument(job.arguments, "--context-parallel-algo")
    if algorithm not in (None, "megatron_cp_algo"):
        yield error(
            f"--context-parallel-algo {algorithm} keeps the groups of its start, so no plan can change them; use "
            "megatron_cp_algo"
        )
    size, length = (_number(argument(job.arguments, flag)) for flag in ("--context-parallel-size", "--seq-length"))
    if size is not None and length is not None and size > 1 and length % (2 * size):
        yield error(
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size {size}, which MindSpeed demands at "
            f"its start; use {length // (2 * size) * 2 * size or 2 * size}"
        )


def _megatron_arguments(job: Job) -> Iterator[LaunchFinding]:
    """Check for arguments with which Megatron ranks would fail in the first step, or at the end of the plan.

    Missing arguments are reported for Megatron-LM's own script only, since others may set them in code.
    """
    if not is_of_megatron(job):
        return
    is_its_own, metadata = is_megatrons_own(job), job.metadata
    batch, steps = (_number(argument(job.arguments, flag)) for flag in ("--global-batch-size", "--train-iters"))
    if batch is not None and metadata.has_equal_batches and batch != metadata.global_batch_size:
        yield error(
            f"the script has --global-batch-size {batch}, but {job.plan} was made for {metadata.global_batch_size}; "
            f"plan with --global-batch-size {batch}, or launch the script with the plan's"
        )
    if steps is not None and steps > metadata.end_step:
        yield error(
            f"the script has --train-iters {steps}, but {job.plan} ends after {counted(metadata.end_step, 'step')}; "
            f"plan more with 'fcp plan --epochs', or launch the script with --train-iters {metadata.end_step}"
        )
    if argument(job.arguments, "--rampup-batch-size") is not None:
        yield error("--rampup-batch-size changes the global batch, which the plan has made; remove it")
    if argument(job.arguments, "--dataloader-type") == "cyclic":
        yield error("--dataloader-type cyclic draws samples at random, and the plan names them; use single")
    degree = _number(argument(job.arguments, "--context-parallel-size"))
    if job.stack == "cuda" and degree is not None and degree > 1:  # MindSpeed's ring may have any size
        yield error(
            f"the script has --context-parallel-size {degree}, but the plan makes the groups; use "
            "--context-parallel-size 1"
        )
    dropout = argument(job.arguments, "--attention-dropout")
    if dropout is not None and dropout.strip("0."):
        yield error(f"--attention-dropout {dropout} cannot be repeated by a ring; use --attention-dropout 0")
    if is_its_own:
        has_loss = "--calculate-per-token-loss" in job.arguments
        needed = [] if has_loss else ["--calculate-per-token-loss"]
        needed += ["--attention-dropout 0"] if dropout is None else []
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


def _layers_per_block(job: Job) -> Iterator[LaunchFinding]:
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
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


# Findings of checks.


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFinding:
    """A problem and its remedy, in one line."""

    severity: Literal["error", "warning"]
    message: str


def error(message: str) -> LaunchFinding:
    """Create a finding that stops the launch."""
    return LaunchFinding(severity="error", message=message)


def warning(message: str) -> LaunchFinding:
    """Create a finding that is printed without stopping the launch."""
    return LaunchFinding(severity="warning", message=message)


def number(facts: Facts, name: str) -> float | None:
    """Return the value of a numeric environment variable, or None if it is unset or not a number."""
    try:
        return float(facts.variables[name])
    except (KeyError, ValueError):
        return None


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
