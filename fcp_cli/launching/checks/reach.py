"""The facts of this machine and its view of a job's nodes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from fcp_cli.launching.job.commands import path_of_python
from fcp_cli.launching.job.job import Job
from fcp_cli.machine import network
from fcp_cli.machine.devices import has_driver_files
from fcp_cli.machine.facts import Facts, collect_facts

_WAY_SECONDS = 10.0


def collect_job_facts(job: Job) -> Facts:
    """Collect the facts that the checks of a job judge."""
    path = path_of_python(sys.executable, os.environ.get("PATH", "")) if job.launcher == "msrun" else None
    facts = collect_facts(machine=job.machine, added=job.environment, path=path, asks_torch=has_driver_files())
    if job.num_nodes == 1 or job.node_rank is None:
        return facts
    addresses = network.addresses_of(job.master_addr)
    # Node 0 may not listen yet, but its machine must be there: no use to wait for one that is not.
    looks_for_node_0 = job.node_rank > 0 and addresses
    # Under msrun, torch meets at the port after the scheduler's.
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
