"""Ranks of a plan: their number, ranks per node, and devices per rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fcp_cli.console import Assumptions
from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.models.cluster import EXAMPLE_CLUSTER, ClusterSpec, load_cluster
from fcp_cli.options import MOST_RANKS
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.validation import shown


def ranks_under(profile: CostProfile, request: PlanRequest, assumptions: Assumptions) -> JobRanks:
    """Return the ranks of a plan under a given profile, whose devices and cluster are the defaults."""
    tensor_parallel, pipeline_parallel = devices_of_rank(
        profile, request.tensor_parallel, request.pipeline_parallel, assumptions
    )
    require_pipelines(request, pipeline_parallel)
    is_whole = request.ranks is not None and request.ranks_per_node is not None
    cluster = None if is_whole else _cluster(profile, request)
    ranks = ranks_on(request, cluster, tensor_parallel, pipeline_parallel, assumptions)
    return replace(ranks, expert_parallel=profile.expert_parallel)


def require_pipelines(request: PlanRequest, pipeline_parallel: int) -> None:
    """Raise UsageError for virtual stages without a pipeline, or if ranks may run unequal numbers of micro-batches."""
    if request.virtual_stages == 1:
        return
    if pipeline_parallel == 1:
        raise UsageError(
            f"--virtual-stages is {request.virtual_stages}, but there is no pipeline: --pipeline-parallel is 1"
        )
    if request.sync == "iteration":
        raise UsageError(
            f"--virtual-stages is {request.virtual_stages}, whose ranks must run equally many micro-batches; add "
            "--sync microbatch"
        )


def devices_of_rank(
    profile: CostProfile, tensor_parallel: int | None, pipeline_parallel: int | None, assumptions: Assumptions
) -> tuple[int, int]:
    """Return (tensor-parallel size, pipeline-parallel size) of a rank: as given, else the cost profile's."""
    given = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    # The block `measurement` is free-form, so entries that are not integers are ignored.
    known = {name: value for name in given if isinstance(value := profile.measurement.get(name), int)}
    for name, value in known.items():
        if not 1 <= value <= MOST_RANKS:
            raise UsageError(
                f"the cost profile of {profile.model} on {profile.cluster} has {name} {shown(value)} in its block "
                f"measurement; it must be from 1 to {MOST_RANKS}"
            )
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
            assumptions.assume(_flag(name), value, "the cost profile")
    devices = math.prod(wanted.values())
    if devices > 1 and not known:
        assumptions.assume("devices of a rank", devices, "the cost profile does not say; its times must be of so many")
    return wanted["tensor_parallel"], wanted["pipeline_parallel"]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _cut_text(cut: Mapping[str, int]) -> str:
    return f"tensor parallel {cut['tensor_parallel']} and pipeline parallel {cut['pipeline_parallel']}"


def ranks_on(
    request: PlanRequest,
    cluster: ClusterSpec | None,
    tensor_parallel: int,
    pipeline_parallel: int,
    assumptions: Assumptions,
) -> JobRanks:
    """Return the ranks of the job; if `cluster` is None, the request must have ranks and ranks per node.

    In Megatron's process order, tensor-parallel processes are adjacent and pipeline stages are furthest apart. The ring
    of a stage thus has as many ranks per node as the node has tensor-parallel groups.
    """
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
        assumptions.assume("--ranks", ranks, f"the cluster {cluster.name}, {each} per rank")
    ranks_per_node = request.ranks_per_node
    if ranks_per_node is None:
        assert cluster is not None
        per_node = ranks if cluster.is_host else cluster.devices_per_node // tensor_parallel  # a host is one node
        ranks_per_node = max(1, min(per_node, ranks))
        assumptions.assume("--ranks-per-node", ranks_per_node, f"the cluster {cluster.name}")
    return JobRanks(
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        virtual_stages=request.virtual_stages,
    )


def _cluster(profile: CostProfile, request: PlanRequest) -> ClusterSpec:
    """Return the profile's cluster, or the example if it is unknown; raise UsageError if ranks are not given either."""
    try:
        return load_cluster(profile.cluster)
    except ProfileError:
        if request.ranks is None:
            raise UsageError(f"the profile's cluster {profile.cluster!r} is not known here; give --ranks") from None
        return load_cluster(EXAMPLE_CLUSTER)
