"""How a plan's ranks are spread over machines. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fcp_cli.errors import RunError, UsageError
from fcp_cli.launching.machine import Machine
from fcp_cli.plan.metadata import PlanMetadata


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`num_nodes` machines with `processes_per_node` processes each."""

    num_nodes: int
    processes_per_node: int


def check_ranks(plan: Path, metadata: PlanMetadata, ranks: int | None) -> None:
    """The plan decides how many ranks there are; saying another number is a mistake worth stopping for.

    Raises:
        RunError: `ranks` is given and differs from the plan's.
    """
    if ranks is not None and ranks != metadata.num_ranks:
        raise RunError(
            f"{plan} is for {metadata.num_ranks} ranks, but --ranks says {ranks}; make a plan for {ranks} with: "
            f"fcp plan {metadata.manifest.name} --ranks {ranks} -o {plan}"
        )


def processes_of(metadata: PlanMetadata) -> int:
    """Devices that the plan's job needs: each rank is a model replica over TP x PP of them."""
    return metadata.num_ranks * metadata.tensor_parallel * metadata.pipeline_parallel


def planned_nodes(metadata: PlanMetadata) -> int:
    """Machines that the plan was made for."""
    return -(-metadata.num_ranks // metadata.ranks_per_node)


def place(plan: Path, metadata: PlanMetadata, machine: Machine, *, nodes: int | None, must_fit: bool) -> Placement:
    """Spread the job over `nodes` machines; by default all of it runs here.

    Args:
        plan: for messages.
        metadata: of the plan.
        machine: this one.
        nodes: as given, or None.
        must_fit: whether this machine will run a part; else the nodes that the plan was made for are taken, too.

    Raises:
        RunError: this machine cannot hold its part.
        UsageError: the ranks do not divide over so many nodes.
    """
    processes = processes_of(metadata)
    if nodes is None:
        nodes = 1 if must_fit or processes <= machine.most_ranks else planned_nodes(metadata)
    if nodes < 1 or processes % nodes:
        raise UsageError(f"--nodes is {nodes}, which does not divide the {processes} processes of {plan}")
    per_node = processes // nodes
    if must_fit and per_node > machine.most_ranks:
        raise RunError(_too_many(plan, metadata, machine, per_node, nodes))
    return Placement(num_nodes=nodes, processes_per_node=per_node)


def _too_many(plan: Path, metadata: PlanMetadata, machine: Machine, per_node: int, nodes: int) -> str:
    here = f"{plan} needs {per_node} processes on this machine, which holds {machine.most_ranks} ({machine.describe()})"
    ranks = max(1, machine.most_ranks // (processes_of(metadata) // metadata.num_ranks))
    fewer = f"plan for fewer ranks with 'fcp plan {metadata.manifest.name} --ranks {ranks} -o {plan}'"
    wanted = max(planned_nodes(metadata), nodes)
    if wanted == 1:
        cpu = "" if machine.device == "cpu" else ", or train on the CPU with --device cpu"
        return f"{here}; {fewer}{cpu}"
    return (
        f"{here}; {fewer}, or run --nodes {wanted} --master-addr HOST --node-rank K on each of {wanted} nodes "
        f"(--nodes {wanted} --dry-run prints their commands)"
    )
