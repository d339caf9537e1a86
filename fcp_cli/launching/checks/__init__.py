"""The preflight: pure functions from a job and the facts of this machine to findings, each one line with its remedy.

Errors stop the launch before anything starts; warnings are shown and the job runs. Faults that make a launch impossible
to describe at all (no plan, an unknown model) raises earlier, in `preflight`.
"""

from __future__ import annotations

from fcp_cli.launching.checks import memory, nodes, plan, software, variables
from fcp_cli.launching.checks.finding import LaunchFinding
from fcp_cli.launching.job.job import Job
from fcp_cli.machine.facts import Facts

__all__ = ["CHECKS", "LaunchFinding", "check_launch"]

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
)


def check_launch(job: Job, facts: Facts) -> list[LaunchFinding]:
    """Everything that is wrong, errors first."""
    found = [finding for check in CHECKS for finding in check(job, facts)]
    return sorted(found, key=lambda finding: finding.severity)
