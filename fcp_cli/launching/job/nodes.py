"""Distributes a plan's ranks over nodes. Pure functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fcp_cli.errors import PlanError, ProfileError, RunError, UsageError
from fcp_cli.machine.devices import LocalDevices
from fcp_cli.models.cluster import load_cluster
from fcp_cli.plan.metadata.again import plan_again
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.reading.documents import parse_yaml

THIS_MACHINE = "this-machine"


def check_ranks(plan: Path, metadata: PlanMetadata, ranks: int | None, model: str | None = None) -> None:
    """Raise RunError if --ranks differs from the plan; `model` is the --model option, for the message."""
    if ranks is not None and ranks != metadata.num_ranks:
        raise RunError(
            f"{plan} is for {metadata.num_ranks} ranks, but --ranks is {ranks}; make a plan for {ranks} with: "
            f"{plan_again(metadata, plan, ranks=ranks, given_model=model)}"
        )


def planned_nodes(metadata: PlanMetadata) -> int:
    """Return the number of nodes for which the plan was made.

    Megatron numbers processes stage by stage, so a node smaller than a stage only has ranks of one stage. A
    larger node holds as many whole stages as fit.
    """
    nodes_per_stage = -(-metadata.num_ranks // metadata.ranks_per_node)
    if nodes_per_stage > 1:
        return nodes_per_stage * metadata.pipeline_parallel
    stage_processes = metadata.num_ranks * metadata.tensor_parallel
    stages_per_node = max(1, (_devices_per_node(metadata) or metadata.num_devices) // stage_processes)
    return -(-metadata.pipeline_parallel // stages_per_node)


def planned_profile(metadata: PlanMetadata) -> dict[str, Any]:
    """Return the plan's cost profile as a mapping; {} if it has none."""
    try:
        profile = parse_yaml(metadata.cost_profile, name="the plan's cost profile", error=PlanError)
    except PlanError:
        return {}
    return profile if isinstance(profile, dict) else {}


def planned_cluster(metadata: PlanMetadata) -> str:
    """Return the cluster named in the plan's cost profile, or ""."""
    return str(planned_profile(metadata).get("cluster") or "")


def _devices_per_node(metadata: PlanMetadata) -> int | None:
    """Return the devices per node of the plan's cluster; None if it is unknown or is this machine."""
    try:
        cluster = load_cluster(planned_cluster(metadata))
    except ProfileError:
        return None
    return None if cluster.name == THIS_MACHINE else cluster.devices_per_node


def place(
    plan: Path,
    metadata: PlanMetadata,
    machine: LocalDevices,
    *,
    nodes: int | None,
    must_fit: bool,
    model: str | None = None,
) -> tuple[int, int]:
    """Distribute the job over nodes; return (nodes, processes per node).

    Args:
        plan: path of the plan, for messages.
        metadata: metadata of the plan.
        machine: this machine.
        nodes: number of nodes as given; None: this machine, or without `must_fit` the planned nodes if it is too small.
        must_fit: whether this machine runs a part of the job, so that too many processes raise RunError.
        model: model as given, for messages.
    """
    processes = metadata.num_devices
    if nodes is None:
        nodes = 1 if must_fit or processes <= machine.most_ranks else planned_nodes(metadata)
    if nodes < 1 or processes % nodes:
        raise UsageError(f"--nodes is {nodes}, which does not divide the {processes} processes of {plan}")
    per_node = processes // nodes
    if must_fit and per_node > machine.most_ranks:
        raise RunError(_too_many(plan, metadata, machine, per_node, nodes, model))
    return nodes, per_node


def _too_many(
    plan: Path, metadata: PlanMetadata, machine: LocalDevices, per_node: int, nodes: int, model: str | None
) -> str:
    here = f"{plan} needs {per_node} processes on this machine, which holds {machine.most_ranks} ({machine.describe()})"
    ranks = max(1, machine.most_ranks // (metadata.devices_per_rank))
    fewer = f"plan for fewer ranks with: {plan_again(metadata, plan, ranks=ranks, given_model=model)}"
    wanted = max(planned_nodes(metadata), nodes)
    if wanted == 1:
        cpu = "" if machine.device == "cpu" else "train on the CPU with --device cpu, or "
        return f"{here}; {cpu}{fewer}"
    return (
        f"{here}; run --nodes {wanted} --master-addr HOST --node-rank K on each of {wanted} nodes "
        f"(--nodes {wanted} --dry-run prints their commands), or {fewer}"
    )
