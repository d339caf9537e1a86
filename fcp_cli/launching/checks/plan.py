"""Checks that the plan matches the actual nodes, model and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError
from fcp_cli.launching.checks.finding import LaunchFinding, error, number, warning
from fcp_cli.launching.checks.memory import job_memory
from fcp_cli.launching.job.environment import COMMUNICATORS, HCCL_BUFFERS
from fcp_cli.launching.job.job import Job
from fcp_cli.launching.job.nodes import THIS_MACHINE, planned_cluster
from fcp_cli.machine.facts import Facts
from fcp_cli.memory.table import RESERVE_FRACTION
from fcp_cli.models.cluster import known_cluster
from fcp_cli.models.model import known_model, load_model
from fcp_cli.plan.metadata.again import plan_again

_OPEN_FILES_PER_RANK = 4  # sockets per peer: gloo pairs of two groups, and the store
_OPEN_FILES_BESIDE = 512  # for everything else in a rank
_HCCL_SHARE = 0.1  # share of device memory that communication buffers may take without a warning
_REPLICAS_APART = "--use-tp-pp-dp-mapping"


def node_size(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that a node holds as many ranks as planned, so that rings planned inside a node stay inside it.

    Megatron numbers processes stage by stage; with --use-tp-pp-dp-mapping, the stages of a rank are adjacent.
    """
    metadata = job.metadata
    neighbours = metadata.tensor_parallel
    if _REPLICAS_APART in job.arguments:
        neighbours *= metadata.pipeline_parallel
    here = max(1, min(metadata.num_ranks, job.processes_per_node // neighbours))
    if job.num_nodes > 1 and here != metadata.ranks_per_node:
        yield warning(
            f"{job.plan} counts {metadata.ranks_per_node} ranks per node, but {here} run on each of {job.num_nodes}: "
            f"its rings would cross nodes unseen; plan with --ranks-per-node {here}"
        )


def profile_model(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that the plan's times and token budget are for the model that runs."""
    profile = job.profile
    if profile is not None and job.model is not None and not _is_same_model(profile.model, job.model):
        again = f" a profile from 'fcp profile --model {job.model}'"
        if profile.origin == "analytic" and known_model(job.model) is None:
            again = f" --model {job.model} on a machine that has it"
        elif profile.origin == "analytic":
            again = f": {plan_again(job.metadata, job.plan, model=job.model)}"
        yield warning(
            f"{job.plan} was made with the cost profile of {profile.model}, not of {job.model}: its times and token "
            f"budget are another model's; plan again with{again}"
        )


def planned_machine(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that the plan's times are for this kind of device."""
    planned = planned_cluster(job.metadata)
    if planned in ("", "unknown", THIS_MACHINE) or job.stack == "unknown":
        return
    found = next((name for name in map(known_cluster, facts.device_names) if name is not None), None)
    here = "CPU cores" if job.stack == "cpu" else next(iter(facts.device_names), job.stack)
    if job.stack == "cpu" or (found is not None and found.partition("-")[0] != planned.partition("-")[0]):
        yield warning(
            f"{job.plan} has the times of {planned}, but its ranks run on {here} here: they will take "
            f"others{_other_recipe(job)}; plan with a profile of this machine from 'fcp profile'"
        )


def _other_recipe(job: Job) -> str:
    """Return a clause for a warning if the bundled trainer's recipe differs from the plan's, else ""."""
    planned = job.metadata.recipe
    if planned is None or job.settings is None:
        return ""
    followed = job.settings.recipe(planned, sync=job.metadata.sync, device=job.machine.device)
    return "" if followed == planned else f", and train as {followed.describe()}, not as {planned.describe()}"


def token_budget(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that a plan without a recipe fits into a device, by the memory block of its cost profile.

    `memory.rank_memory` covers plans with a recipe. Without --model, a script's model defaults to the plan's, as the
    message says.
    """
    profile, capacity = job.profile, facts.device_memory_bytes
    if profile is None or not capacity or not _knows_memory(profile, job) or job_memory(job, facts) is not None:
        return
    memory = profile.memory
    needed = memory.model_state_bytes + job.metadata.tokens_per_rank * memory.bytes_per_token
    if needed <= capacity:
        return
    room = replace(memory, capacity_bytes=capacity * (1 - RESERVE_FRACTION)).tokens_per_rank() or 0
    remedy = f"plan with --tokens-per-rank {room}" if room > 0 else "the model alone is larger, so choose a smaller one"
    model = "the model" if job.model is not None else f"{profile.model}, the plan's model"
    is_certain = profile.origin in ("measured", "fitted") and job.model is not None  # analytic profiles are estimates
    yield (error if is_certain else warning)(
        f"{job.plan} lets a rank hold {job.metadata.tokens_per_rank:,} tokens, {needed / 1e9:.1f} GB with {model}, "
        f"but a device here has {capacity / 1e9:.1f} GB; {remedy}"
    )


def hccl_buffers(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check HCCL's buffer memory: each communicator takes two buffers of HCCL_BUFFSIZE MB per device."""
    size, capacity = number(facts, "HCCL_BUFFSIZE"), facts.device_memory_bytes
    if job.stack != "npu" or size is None or not capacity:
        return
    total = COMMUNICATORS * HCCL_BUFFERS * size * (1 << 20)
    if total > _HCCL_SHARE * capacity:
        yield warning(
            f"HCCL_BUFFSIZE={size:.0f} takes {total / 1e9:.1f} GB of each device's {capacity / 1e9:.0f} GB for "
            f"{COMMUNICATORS} communicators; unset it to let fcp choose"
        )
    groups = job.metadata.distinct_groups
    rings = groups * HCCL_BUFFERS * size * (1 << 20)
    if not job.is_bundled and rings > _HCCL_SHARE * capacity:
        yield warning(
            f"{job.plan} has {groups} distinct groups: a framework that makes a communicator for each would take up to "
            f"{rings / 1e9:.0f} GB per device; plan with --max-groups, or use fcp_cli.runtime, which makes one for all"
        )


def open_files(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check the open file limit: every rank has sockets to all others."""
    processes = job.num_nodes * job.processes_per_node
    needed = _OPEN_FILES_BESIDE + _OPEN_FILES_PER_RANK * processes
    if 0 < facts.open_files < needed:
        yield warning(
            f"a process may open {facts.open_files} files, but a rank of {processes} may need {needed}; "
            f"raise it with: ulimit -n {needed}"
        )


def _is_same_model(first: str, second: str) -> bool:
    return _model_name(first) == _model_name(second)


def _model_name(model: str) -> str:
    """Return a model's name as in cost profiles, which is independent of the checkpoint's path."""
    try:
        return load_model(model).name
    except ProfileError:
        return model


def _knows_memory(profile: CostProfile, job: Job) -> bool:
    """Return whether the profile's memory block applies: an accelerator job whose model is not known to differ."""
    is_this = job.model is None or _is_same_model(profile.model, job.model)
    return job.stack != "cpu" and is_this and profile.memory.bytes_per_token > 0
