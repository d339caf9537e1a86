"""Ranks of a plan: their number, ranks per node, and devices per rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError, UsageError
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.models.cluster import EXAMPLE_CLUSTER, ClusterSpec, load_cluster
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.setup import QUICKEST, SLOWEST, Speeds, named_speeds, speeds_text
from fcp_cli.planning.options import PlanRequest
from fcp_cli.util.console import Assumptions
from fcp_cli.util.inputs import parse_yaml, read_text
from fcp_cli.util.options import MOST_RANKS
from fcp_cli.util.validation import shown


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


# Parsing of rank speeds: a list, assignments such as `12=0.7`, or a file of either.

_NAME: Final = re.compile(r"(?:(?P<node>node)(?P<number>\d+)|(?P<first>\d+)(?:-(?P<last>\d+))?)$")
_FORMS: Final = (
    "one speed per rank, as 1,1,0.7,1; or the others' only, as 12=0.7,16-23=0.9,node3=0.8; or a file of them"
)

GivenSpeeds: TypeAlias = str | Sequence[float] | Mapping[Any, float]


def read_rank_speeds(given: GivenSpeeds, *, num_ranks: int, ranks_per_node: int) -> Speeds | None:
    """Return [num_ranks] the rank speeds relative to the cost profile, or None if all are 1.

    Args:
        given: a list of one speed per rank, or a mapping from rank (`12`), rank range (`16-23`) or node (`node3`) to
            speed, with 1 for all others. Either may be comma-separated text or the name of a YAML or JSON file.
        num_ranks, ranks_per_node: of the job.

    Raises:
        UsageError: the speeds are malformed, out of range, or name ranks that the job does not have.
    """
    where = "--rank-speeds"
    if isinstance(given, str):
        given, where = _spoken(given, where)
    if isinstance(given, Mapping):
        speeds = [1.0] * num_ranks
        for name, speed in given.items():
            for rank in _ranks(str(name), num_ranks, ranks_per_node, where):
                speeds[rank] = _speed(speed, str(name), where)
    elif isinstance(given, Sequence):
        if len(given) != num_ranks:
            raise UsageError(f"{where} has {len(given)} speeds for {num_ranks} ranks; it takes {_FORMS}")
        speeds = [_speed(speed, str(rank), where) for rank, speed in enumerate(given)]
    else:
        raise UsageError(f"{where} is {given!r}; it takes {_FORMS}")
    return tuple(speeds) if any(speed != 1.0 for speed in speeds) else None


def requested_speeds(request: PlanRequest, num_ranks: int, ranks_per_node: int) -> Speeds | None:
    """Return [ranks] the speeds of `--rank-speeds`, or None if all are 1."""
    if request.rank_speeds is None:
        return None
    for flag, given in (("balance", request.encoder_balance != "ring"), ("ranks", request.encoder_ranks is not None)):
        if given:
            raise UsageError(f"--encoder-{flag} shares work as if ranks were equally fast; remove it or --rank-speeds")
    return read_rank_speeds(request.rank_speeds, num_ranks=num_ranks, ranks_per_node=ranks_per_node)


def speeds_of_run(
    request: PlanRequest,
    metadata: PlanMetadata,
    step: int,
    num_ranks: int,
    ranks_per_node: int,
    assumptions: Assumptions,
) -> Speeds | None:
    """Return the rank speeds of a continued run: as given, else the run's if the number of ranks is unchanged."""
    if request.rank_speeds is not None:
        return requested_speeds(request, num_ranks, ranks_per_node)
    before = metadata.speeds_at(step)
    if before is None or num_ranks != metadata.num_ranks:
        return None
    assumptions.assume("--rank-speeds", speeds_text(named_speeds(before) or {}), "the run's plan")
    return before


def speeds_words(given: GivenSpeeds | None) -> str | None:
    """Return speeds as the argument of `--rank-speeds`."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return ",".join(f"{name}={speed}" for name, speed in given.items()) or None
    return ",".join(str(speed) for speed in given)


def _spoken(text: str, where: str) -> tuple[Any, str]:
    """Return the parsed value of text or of the file that it names, and its location for messages."""
    words = [word.strip() for word in text.split(",")]
    if all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words), where
    # A single number is the list of a job with one rank; any other single word names a file.
    if len(words) > 1 or _is_number(text):
        return words, where
    document = parse_yaml(read_text(Path(text), error=UsageError, label=f"{where}: "), name=text, error=UsageError)
    return document, f"{where}: {text}"


def _ranks(name: str, num_ranks: int, ranks_per_node: int, where: str) -> Iterator[int]:
    found = _NAME.match(name)
    if found is None:
        raise UsageError(f"{where} names {name!r}; it takes {_FORMS}")
    if found["node"]:
        first, nodes = int(found["number"]) * ranks_per_node, -(-num_ranks // ranks_per_node)
        if first >= num_ranks:
            raise UsageError(f"{where} names node {found['number']} of a job of {nodes} nodes, which count from 0")
        yield from range(first, min(first + ranks_per_node, num_ranks))
        return
    first, last = int(found["first"]), int(found["last"] or found["first"])
    if last >= num_ranks or last < first:
        raise UsageError(f"{where} names {name} of a job of {num_ranks} ranks, which count from 0")
    yield from range(first, last + 1)


def _speed(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not _is_number(str(value)) or not SLOWEST <= float(value) <= QUICKEST:
        raise UsageError(
            f"{where} says {value} of {name}; a speed is a number from {SLOWEST:g} to {QUICKEST:g}, and 1 is as the "
            "cost profile says"
        )
    return float(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
