"""Preflight checks: pure functions from a job and facts of this machine to findings of one line, with a remedy.

Errors stop the launch before anything starts; warnings are only printed. Faults that prevent resolving a job at all (no
plan, an unknown model) raise earlier, some of them in `preflight`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from fcp_cli.launching.checks import megatron_recipe, memory, nodes, plan, software, variables
from fcp_cli.launching.checks.finding import LaunchFinding
from fcp_cli.launching.job.commands import path_of_python
from fcp_cli.launching.job.job import Job
from fcp_cli.machine import network
from fcp_cli.machine.devices import has_driver_files
from fcp_cli.machine.facts import Facts, collect_facts

__all__ = ["CHECKS", "LaunchFinding", "check_launch", "collect_job_facts"]

CHECKS = (
    nodes.master_address,
    nodes.master_port,
    nodes.hccl_ports,
    nodes.hosts,
    nodes.interfaces,
    nodes.slurm_nodes,
    plan.node_size,
    plan.profile_model,
    plan.planned_machine,
    memory.rank_memory,
    memory.host_copies,
    plan.token_budget,
    plan.hccl_buffers,
    plan.open_files,
    variables.hccl_timeouts,
    variables.device_connections,
    variables.blocking_launches,
    variables.visible_devices,
    variables.thread_count,
    variables.backend_autoload,
    software.cann,
    software.torch_versions,
    software.transformers_version,
    software.msrun,
    software.pdsh,
    software.script_arguments,
    megatron_recipe.recipe_arguments,
)

_WAY_SECONDS = 10.0


def check_launch(job: Job, facts: Facts) -> list[LaunchFinding]:
    """Return all findings, errors first."""
    found = [finding for check in CHECKS for finding in check(job, facts)]
    return sorted(found, key=lambda finding: finding.severity)


def collect_job_facts(job: Job) -> Facts:
    """Collect the facts that a job's checks need."""
    path = path_of_python(sys.executable, os.environ.get("PATH", "")) if job.launcher == "msrun" else None
    facts = collect_facts(machine=job.machine, added=job.environment, path=path, asks_torch=has_driver_files())
    if job.num_nodes == 1 or job.node_rank is None:
        return facts
    addresses = network.addresses_of(job.master_addr)
    # Node 0 may not listen yet, but must be reachable: waiting for a missing machine is futile.
    looks_for_node_0 = job.node_rank > 0 and addresses
    # Under msrun, torch's rendezvous uses the port after the scheduler's.
    ports = (job.master_port, job.master_port + 1) if job.launcher == "msrun" else (job.master_port,)
    return replace(
        facts,
        master_addresses=addresses,
        master_is_here=network.is_here(job.master_addr),
        way_problem=network.way_problem(job.master_addr, job.master_port, seconds=_WAY_SECONDS)
        if looks_for_node_0
        else "",
        port_problem=next(filter(None, map(network.port_problem, ports)), "") if job.node_rank == 0 else "",
        hosts_here=tuple(number for number, host in enumerate(job.hosts) if network.is_here(host)),
    )
