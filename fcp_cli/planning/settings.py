"""Completes a `PlanRequest` to a whole planning problem, and records what it assumed where an option was not given.

Order: flags (and what stands for them: environment, fcp.yaml), then the folder (`profile.yaml`), then the shipped
profile and the cluster that the profile names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fcp_cli.console import Origins
from fcp_cli.cost.profile import CostProfile, load_cost_profile, parse_cost_profile
from fcp_cli.errors import ManifestError, ProfileError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.shipped import EXAMPLE_CLUSTER, shipped_profile
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.padding import padding_multiple
from fcp_cli.plan.reader import PlanReader
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.continuation import RemainingSteps, batches_to_plan, remaining_steps, settings_of
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Problem, whole_budget
from fcp_cli.words import counted

_FOLDER_PROFILE = Path("profile.yaml")
_EXAMPLE_MODEL = "qwen3-8b"
ASSUMED_TOKENS_PER_RANK = 16_384
ASSUMED_GLOBAL_BATCH_SIZE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInputs:
    """Everything that a solver needs."""

    table: LengthTable
    problem: Problem
    settings: BatchSettings
    remaining: RemainingSteps | None = None

    def batches(self) -> GlobalBatches:
        """Return the global batches to plan.

        Raises:
            OverlongError, ManifestError: some sequences cannot be planned, or none are left.
        """
        return batches_to_plan(self.table, self.problem, self.settings, self.remaining)


def resolve_continuation(
    request: PlanRequest, origins: Origins, *, plan: Path, first_step: int, manifest: Path, length_column: str
) -> PlanInputs:
    """Plan what a trained run has left for other ranks; what `request` leaves open is as it was.

    Args:
        request: how many ranks continue, and what else differs; the batches stay those of the run.
        origins: takes what was assumed.
        plan: the plan that the run followed.
        first_step: the first step that is not trained yet.
        manifest: the plan's manifest.
        length_column: its column that was planned.

    Raises:
        PlanError, ManifestError, ProfileError: a file cannot be used.
        UsageError: impossible settings.
    """
    reader = PlanReader(plan)
    metadata = reader.metadata
    table = read_manifest(manifest, length_column=length_column)
    if table.content_hash() != metadata.manifest.content_hash:
        raise ManifestError(
            f"{manifest} is not the manifest {metadata.manifest.name} that {plan} was made from, or it "
            "was changed since; name the right one: fcp plan MANIFEST --continue-from ..."
        )
    ranks = request.ranks or metadata.num_ranks
    ranks_per_node = request.ranks_per_node or min(metadata.ranks_per_node, ranks)
    if request.ranks_per_node is None:
        origins.assume("--ranks-per-node", ranks_per_node, f"the run had {metadata.ranks_per_node}")
    if request.tokens_per_rank is None:
        origins.assume("--tokens-per-rank", metadata.tokens_per_rank, "the run's plan")
    tokens = request.tokens_per_rank or metadata.tokens_per_rank
    profile = _profile_of_run(request.profile, plan, metadata, origins)
    tensor_parallel, pipeline_parallel = devices_of_rank(
        profile, metadata.tensor_parallel, metadata.pipeline_parallel, origins
    )
    padding = metadata.padding_multiple
    return PlanInputs(
        table=table,
        problem=Problem(
            num_ranks=ranks,
            ranks_per_node=ranks_per_node,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            tokens_per_rank=_whole_budget(_with_headroom(tokens, request.headroom), padding, origins),
            padding_multiple=padding,
            sync=metadata.sync,
            profile=profile,
        ),
        settings=settings_of(metadata),
        remaining=remaining_steps(reader, first_step),
    )


def _profile_of_run(given: Path | None, plan: Path, metadata: PlanMetadata, origins: Origins) -> CostProfile:
    if given is not None:
        return load_cost_profile(given)
    profile = parse_cost_profile(metadata.cost_profile, name=f"{plan}: the plan's cost profile")
    origins.assume("--profile", f"{profile.model} on {profile.cluster}", "the run's plan")
    return profile


def resolve(request: PlanRequest, origins: Origins) -> PlanInputs:
    """Fill in what was not given; every assumption goes to `origins`.

    Raises:
        ManifestError, ProfileError: a file cannot be used.
        UsageError: settings that contradict each other or cannot be assumed.
    """
    if request.manifest is None:
        raise UsageError("name the MANIFEST to plan, like 'fcp plan dataset.parquet', or a run with --continue-from")
    table = read_manifest(request.manifest, length_column=request.length_column)
    profile = _profile(request, origins)
    tensor_parallel, pipeline_parallel = devices_of_rank(
        profile, request.tensor_parallel, request.pipeline_parallel, origins
    )
    sync = request.sync or "microbatch"  # the only one that pipelines allow, too
    if pipeline_parallel > 1 and sync != "microbatch":
        raise UsageError(
            f"pipeline parallel is {pipeline_parallel}, whose ranks must run equally many micro-batches; add "
            "--sync microbatch"
        )
    ranks, ranks_per_node = _ranks(request, profile, tensor_parallel, pipeline_parallel, origins)
    padding = padding_multiple(tensor_parallel) if request.padded_rings else None
    return PlanInputs(
        table=table,
        problem=Problem(
            num_ranks=ranks,
            ranks_per_node=ranks_per_node,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            tokens_per_rank=_whole_budget(_tokens_per_rank(request, profile, origins), padding, origins),
            padding_multiple=padding,
            sync=sync,
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


def devices_of_rank(
    profile: CostProfile, tensor_parallel: int | None, pipeline_parallel: int | None, origins: Origins
) -> tuple[int, int]:
    """Return the tensor- and pipeline-parallel devices of a rank: as given, else as the cost profile has them.

    Raises:
        UsageError: the profile is of ranks of other devices, whose times and memory would be planned with.
    """
    given = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    known = {name: value for name in given if isinstance(value := profile.measurement.get(name), int)}
    wanted = {name: value or known.get(name, 1) for name, value in given.items()}
    if any(known.get(name, value) != value for name, value in wanted.items()):
        cut = " ".join(f"{_flag(name)} {value}" for name, value in wanted.items())
        raise UsageError(
            f"the plan is for {_cut_text(wanted)}, but the cost profile of {profile.model} on {profile.cluster} is for "
            f"{_cut_text({**wanted, **known})}; make one with: fcp profile --analytic --model {profile.model} "
            f"--cluster {profile.cluster} {cut} -o profile.yaml"
        )
    for name, value in wanted.items():
        if given[name] is None and value > 1:
            origins.assume(_flag(name), value, "the cost profile")
    devices = math.prod(wanted.values())
    if devices > 1 and not known:
        origins.assume("devices of a rank", devices, "the cost profile does not say; its times must be of so many")
    return wanted["tensor_parallel"], wanted["pipeline_parallel"]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _cut_text(cut: Mapping[str, int]) -> str:
    return f"tensor parallel {cut['tensor_parallel']} and pipeline parallel {cut['pipeline_parallel']}"


def _ranks(
    request: PlanRequest, profile: CostProfile, tensor_parallel: int, pipeline_parallel: int, origins: Origins
) -> tuple[int, int]:
    """Return the ranks of the job, and of a node.

    As Megatron orders its processes, those of a rank's tensor parallelism are neighbours, and a pipeline's stages lie
    all ranks apart: the ring of a stage meets as many ranks on a node as there are tensor-parallel groups on it.

    Raises:
        UsageError: the cluster is too small for one rank, or unknown.
    """
    cluster = None
    if request.ranks is None or request.ranks_per_node is None:
        cluster = _cluster(profile, request)
    ranks = request.ranks
    if ranks is None:
        assert cluster is not None
        devices = tensor_parallel * pipeline_parallel
        ranks = cluster.num_devices // devices
        if not ranks:
            raise UsageError(
                f"a rank has {devices} devices, but the cluster {cluster.name} has {cluster.num_devices}; give --ranks"
            )
        each = "one device" if devices == 1 else f"{devices} devices"
        origins.assume("--ranks", ranks, f"the cluster {cluster.name}, {each} per rank")
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        assert cluster is not None
        ranks_per_node = max(1, min(cluster.devices_per_node // tensor_parallel, ranks))
        origins.assume("--ranks-per-node", ranks_per_node, f"the cluster {cluster.name}")
    return ranks, ranks_per_node


def _cluster(profile: CostProfile, request: PlanRequest) -> ClusterSpec:
    """Return the cluster that the profile names, or the example where its shape cannot be known."""
    try:
        return load_cluster(profile.cluster)
    except ProfileError:
        if request.ranks is None:
            raise UsageError(f"the profile's cluster {profile.cluster!r} is not known here; give --ranks") from None
        return load_cluster(EXAMPLE_CLUSTER)


def _tokens_per_rank(request: PlanRequest, profile: CostProfile, origins: Origins) -> int:
    tokens, room = request.tokens_per_rank, profile.memory.tokens_per_rank()
    if tokens is not None and room is not None and tokens > room:
        origins.warn(f"--tokens-per-rank is {tokens:,}, but by the profile's memory a rank holds {max(room, 0):,}")
    if tokens is None:
        tokens = room
        if tokens is not None and tokens < 1:
            raise UsageError("the profile's memory leaves no room for tokens; give --tokens-per-rank")
        if tokens is not None:
            origins.assume("--tokens-per-rank", tokens, "the profile's memory")
        else:
            tokens = ASSUMED_TOKENS_PER_RANK
            origins.assume("--tokens-per-rank", tokens, "the profile's memory figures are missing")
    return _with_headroom(tokens, request.headroom)


def _with_headroom(tokens: int, headroom: float) -> int:
    if not 0 <= headroom < 1:
        raise UsageError(f"--headroom is {headroom}; it must be a fraction from 0 to below 1")
    return max(1, math.floor(tokens * (1.0 - headroom)))


def _whole_budget(tokens: int, padding: int | None, origins: Origins) -> int:
    """Return the token budget, or what of it padded sequences can fill.

    Raises:
        UsageError: they can fill nothing.
    """
    whole = whole_budget(tokens, padding)
    if not whole:
        raise UsageError(f"a rank may hold {counted(tokens, 'token')}, but sequences are padded to {padding} on it")
    if whole != tokens:
        origins.assume("--tokens-per-rank", whole, f"of {tokens}, since sequences are padded to multiples of {padding}")
    return whole


def _global_batch_size(request: PlanRequest, rows: int, origins: Origins) -> int:
    if request.global_batch_size is not None:
        return request.global_batch_size
    size = min(ASSUMED_GLOBAL_BATCH_SIZE, rows)
    origins.assume("--global-batch-size", size, "the papers' 512" if size < rows else "all sequences")
    return size
