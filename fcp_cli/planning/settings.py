"""From what a user said to a whole planning problem, and what was assumed where the user said nothing.

Order: flags (and what stands for them: environment, fcp.yaml), then the folder (`profile.yaml`), then the shipped
profile and the cluster that the profile names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.console import Origins
from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings, LastBatch, OverlongPolicy
from fcp_cli.planning.problem import Problem
from fcp_cli.profiling.clusters import ClusterSpec, load_cluster
from fcp_cli.profiling.shipped import EXAMPLE_CLUSTER, shipped_profile

_FOLDER_PROFILE = Path("profile.yaml")
_EXAMPLE_MODEL = "qwen3-8b"
_ASSUMED_TOKENS_PER_RANK = 16_384
_ASSUMED_GLOBAL_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What the user said; None where nothing."""

    manifest: Path
    profile: Path | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    tokens_per_rank: int | None = None
    headroom: float = 0.0
    global_batch_size: int | None = None
    sync: Sync = "iteration"
    seed: int = 0
    shuffle: bool = True
    epochs: int = 1
    max_length: int | None = None
    overlong: OverlongPolicy = "error"
    last_batch: LastBatch = "keep"
    length_column: str = "length"
    steps: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Everything that a solver needs."""

    table: LengthTable
    problem: Problem
    settings: BatchSettings


def resolve(request: PlanRequest, origins: Origins) -> PlanInputs:
    """Fill in what was not said; every assumption goes to `origins`.

    Raises:
        ManifestError, ProfileError: a file cannot be used.
        UsageError: settings that contradict each other or cannot be assumed.
    """
    table = read_manifest(request.manifest, length_column=request.length_column)
    profile = _profile(request, origins)
    ranks, ranks_per_node = _ranks(request, profile, origins)
    return PlanInputs(
        table=table,
        problem=Problem(
            num_ranks=ranks,
            ranks_per_node=ranks_per_node,
            tokens_per_rank=_tokens_per_rank(request, profile, origins),
            sync=request.sync,
            profile=profile,
        ),
        settings=BatchSettings(
            global_batch_size=_global_batch_size(request, len(table), origins),
            seed=request.seed,
            shuffle=request.shuffle,
            epochs=request.epochs,
            last_batch=request.last_batch,
            max_length=request.max_length,
            overlong=request.overlong,
            step_limit=request.steps,
        ),
    )


def _profile(request: PlanRequest, origins: Origins) -> CostProfile:
    if request.profile is not None:
        return load_cost_profile(request.profile)
    if _FOLDER_PROFILE.is_file():
        profile = load_cost_profile(_FOLDER_PROFILE)
        origins.assume("--profile", _FOLDER_PROFILE, f"found here: {profile.model} on {profile.cluster}")
        return profile
    profile = shipped_profile(_EXAMPLE_MODEL)
    reason = f"shipped, {profile.origin}; 'fcp profile' measures yours"
    origins.assume("--profile", f"{profile.model} on {profile.cluster}", reason)
    return profile


def _ranks(request: PlanRequest, profile: CostProfile, origins: Origins) -> tuple[int, int]:
    """Ranks of the job, and of a node."""
    cluster = None
    if request.ranks is None or request.ranks_per_node is None:
        cluster = _cluster(profile, request)
    ranks = request.ranks
    if ranks is None:
        assert cluster is not None
        ranks = cluster.num_devices
        origins.assume("--ranks", ranks, f"the cluster {cluster.name}, one device per rank")
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        assert cluster is not None
        ranks_per_node = min(cluster.devices_per_node, ranks)
        origins.assume("--ranks-per-node", ranks_per_node, f"the cluster {cluster.name}")
    return ranks, ranks_per_node


def _cluster(profile: CostProfile, request: PlanRequest) -> ClusterSpec:
    """The cluster that the profile names, or the example where nobody can know its shape."""
    try:
        return load_cluster(profile.cluster)
    except ProfileError:
        if request.ranks is None:
            raise UsageError(f"the profile's cluster {profile.cluster!r} is not known here; give --ranks") from None
        return load_cluster(EXAMPLE_CLUSTER)


def _tokens_per_rank(request: PlanRequest, profile: CostProfile, origins: Origins) -> int:
    if not 0 <= request.headroom < 1:
        raise UsageError(f"--headroom is {request.headroom}; it must be a fraction from 0 to below 1")
    tokens, room = request.tokens_per_rank, profile.memory.tokens_per_rank()
    if tokens is not None and room is not None and tokens > room:
        origins.assume("--tokens-per-rank", tokens, f"as given, but the profile's memory holds {max(room, 0)}")
    if tokens is None:
        tokens = room
        if tokens is not None and tokens < 1:
            raise UsageError("the profile's memory leaves no room for tokens; give --tokens-per-rank")
        if tokens is not None:
            origins.assume("--tokens-per-rank", tokens, "the profile's memory")
        else:
            tokens = _ASSUMED_TOKENS_PER_RANK
            origins.assume("--tokens-per-rank", tokens, "the profile's memory figures are missing")
    return max(1, math.floor(tokens * (1.0 - request.headroom)))


def _global_batch_size(request: PlanRequest, rows: int, origins: Origins) -> int:
    if request.global_batch_size is not None:
        return request.global_batch_size
    size = min(_ASSUMED_GLOBAL_BATCH_SIZE, rows)
    origins.assume("--global-batch-size", size, "the papers' 512" if size < rows else "all sequences")
    return size
