"""Checks installed packages, their versions, and a script's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fcp_cli.extras import pip_install
from fcp_cli.launching.checks.finding import LaunchFinding, error, warning
from fcp_cli.launching.job.commands import interpreter_name
from fcp_cli.launching.job.inject import without_entry
from fcp_cli.launching.job.job import Job, argument
from fcp_cli.machine.facts import Facts
from fcp_cli.words import counted

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
