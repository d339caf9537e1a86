"""Validate, before the first step, that all ranks follow the same plan and that it is for their number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.file import read_proven
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    import torch

    from fcp_cli.runtime.transport import World

NO_TRAINING = (
    "the plan is of forward passes (phase forward), whose micro-batches have no backward; train under a plan that was "
    "made without --phase forward"
)
_HEX_DIGITS_PER_WORD = 4  # 16-bit words fit the int32 reductions of every back end
_HASH_WORDS = 16


def agree_on_plan(
    world: World, path: Path, device: torch.device, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> PlanMetadata:
    """Read the plan on every rank, verify its content unless the launcher has, and compare its hash over all ranks.

    Args:
        world: all processes.
        path: path of the plan.
        device: device of the collectives' tensors.
        tensor_parallel, pipeline_parallel: sizes in the job; their product is the number of processes per rank of the
            plan.

    Returns:
        The plan's metadata, the same on every rank.
    """
    from fcp_cli.runtime.transport import gather_words

    def gather(words: IntArray) -> IntArray:
        return np.array(gather_words(world, words.tolist(), device), dtype=np.int64)

    return agree_by(path, gather, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)


def agree_by(
    path: Path, gather: Callable[[IntArray], IntArray], *, tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> PlanMetadata:
    """Agree on the plan as in `agree_on_plan`, through any framework's collectives.

    Args:
        path: path of the plan.
        gather: all-gathers this process's [words] to [processes, words].
        tensor_parallel, pipeline_parallel: sizes in the job.
    """
    metadata, fault = None, None
    try:
        metadata = read_proven(path)
    except FcpError as error:  # raised after the collective, so that all ranks stop together
        fault = error
    table = gather(_words_of(metadata))
    if fault is not None:
        raise fault
    unusable = np.flatnonzero(table[:, 0] == 0).tolist()
    if unusable or metadata is None:
        raise RunError(f"{_name(unusable)} cannot follow the plan {path}; the line that it printed says why")
    different = np.flatnonzero((table != table[0]).any(axis=1)).tolist()
    if different:
        raise RunError(
            f"{_name(different)} has another plan than rank 0 under {path} (plan hash here "
            f"{metadata.plan_hash[:12]}); put one plan file where all ranks read it"
        )
    _check_size(len(table), path, metadata, tensor_parallel, pipeline_parallel)
    return metadata


def _words_of(metadata: PlanMetadata | None) -> IntArray:
    """Return [17] int64 words for `gather`: 1 and the plan's hash, or zeros if the plan cannot be followed."""
    if metadata is None:
        return np.zeros(1 + _HASH_WORDS, dtype=np.int64)
    size = _HEX_DIGITS_PER_WORD
    digits = metadata.plan_hash.ljust(_HASH_WORDS * size, "0")
    return np.array([1, *(int(digits[i : i + size], 16) for i in range(0, len(digits), size))], dtype=np.int64)


def _check_size(
    launched: int, path: Path, metadata: PlanMetadata, tensor_parallel: int, pipeline_parallel: int
) -> None:
    planned = (metadata.tensor_parallel, metadata.pipeline_parallel)
    # A plan made without parallel sizes fits any.
    if planned not in ((1, 1), (tensor_parallel, pipeline_parallel)):
        raise RunError(
            f"the plan {path} has tensor parallel {metadata.tensor_parallel} and pipeline parallel "
            f"{metadata.pipeline_parallel}, but this job {tensor_parallel} and {pipeline_parallel}; plan with the job's"
        )
    ranks = launched // (tensor_parallel * pipeline_parallel)
    if ranks != metadata.num_ranks:
        raise RunError(
            f"the plan {path} is for {metadata.num_ranks} ranks but {ranks} were launched; launch "
            f"{metadata.num_ranks}, or make a plan for {ranks} with: {plan_again(metadata, path, ranks=ranks)}"
        )


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"each of ranks {shown}{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}"


def require_causal(metadata: PlanMetadata, path: Path, loop: str) -> None:
    """Raise RunError if the plan has masks, which the loop does not support.

    Args:
        metadata, path: metadata and path of the plan.
        loop: name of the loop.
    """
    if metadata.masked_sequences is not None:
        raise RunError(
            f"{path} was planned for {counted(metadata.masked_sequences, 'sequence')} with masks (column eta of "
            f"{metadata.manifest.name}), but {loop} would train them causally; plan lengths without eta, or train them "
            "in a loop of fcp.steps (docs/how-to/training-loop.md)"
        )


def require_training(metadata: PlanMetadata, path: Path | None = None, loop: str | None = None) -> None:
    """Raise RunError if the plan is of forward passes, or recomputes as needed and the loop cannot.

    Args:
        metadata, path: metadata and path of the plan.
        loop: name of a loop that recomputes all micro-batches alike, or None if it recomputes as planned.
    """
    if metadata.phase == "forward":
        raise RunError(NO_TRAINING)
    if loop is not None and metadata.recipe is not None and metadata.recipe.recompute == "as-needed":
        raise RunError(
            f"{path} was planned with --recompute as-needed, which {loop} cannot choose for each micro-batch; plan "
            "with --recompute selective"
        )
