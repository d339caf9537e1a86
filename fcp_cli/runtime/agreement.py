"""Before the first step, all ranks make sure that they follow one and the same plan, made for as many ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from fcp_cli.errors import FcpError, PlanError, RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.reader import PlanReader
from fcp_cli.runtime.world import World

_HEX_DIGITS_PER_WORD = 4  # words of 16 bits: small enough for every back end's int32 reductions
_WORDS = 16


def agree_on_plan(world: World, path: Path, device: torch.device) -> PlanMetadata:
    """Read the plan on every rank, prove that its content is what its hash says, and compare the hash over all ranks.

    Returns:
        The plan's metadata, the same on every rank.

    Raises:
        PlanError: this rank's file is missing, damaged, or was edited.
        RunError: another rank's file is; ranks have different plans; or the plan is for another number of ranks.
    """
    metadata, error = _try_to_read(path)
    unusable = _ranks_where(world, error is not None, device)
    if error is not None:
        raise error
    if unusable or metadata is None:
        raise RunError(f"{_name(unusable)} cannot follow the plan {path}; the line that it printed says why")
    _compare_hashes(world, path, metadata.plan_hash, device)
    _check_size(world, path, metadata)
    return metadata


def read_proven(path: Path) -> PlanMetadata:
    """The metadata of a plan whose content is what its hash says.

    Raises:
        PlanError: the file is missing, damaged, or was edited.
    """
    reader = PlanReader(path)
    if reader.content_hash() != reader.metadata.plan_hash:
        raise PlanError(f"{path} was edited: its content does not match its plan hash; make it again with 'fcp plan'")
    return reader.metadata


def _try_to_read(path: Path) -> tuple[PlanMetadata | None, FcpError | None]:
    try:
        return read_proven(path), None
    except FcpError as error:
        return None, error


def _compare_hashes(world: World, path: Path, plan_hash: str, device: torch.device) -> None:
    digits = plan_hash.ljust(_WORDS * _HEX_DIGITS_PER_WORD, "0")
    words = [int(digits[i : i + _HEX_DIGITS_PER_WORD], 16) for i in range(0, len(digits), _HEX_DIGITS_PER_WORD)]
    mine = torch.tensor(words, dtype=torch.int32, device=device)
    first = mine.clone()
    world.broadcast(first)
    different = _ranks_where(world, not torch.equal(mine, first), device)
    if different:
        raise RunError(
            f"{_name(different)} has another plan than rank 0 under {path} (plan hash here {plan_hash[:12]}); "
            "put one plan file where all ranks read it"
        )


def _check_size(world: World, path: Path, metadata: PlanMetadata) -> None:
    if world.size != metadata.num_ranks:
        raise RunError(
            f"the plan {path} is for {metadata.num_ranks} ranks but {world.size} were launched; launch "
            f"{metadata.num_ranks}, or make a plan for {world.size} with "
            f"'fcp plan {metadata.manifest.name} --ranks {world.size} -o {path}'"
        )
    if metadata.tensor_parallel * metadata.pipeline_parallel != 1:
        raise RunError(
            f"the plan {path} has tensor parallel {metadata.tensor_parallel} and pipeline parallel "
            f"{metadata.pipeline_parallel}, which this runtime does not drive; plan with both 1"
        )


def _ranks_where(world: World, condition: bool, device: torch.device) -> list[int]:
    """The ranks on which `condition` holds; the same list everywhere."""
    flags = torch.zeros(world.size, dtype=torch.int32, device=device)
    flags[world.rank] = int(condition)
    world.all_reduce_sum(flags)
    ranks: list[int] = flags.nonzero().flatten().tolist()
    return ranks


def _name(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"each of ranks {shown}{f' and {len(ranks) - 4} more' if len(ranks) > 4 else ''}"
