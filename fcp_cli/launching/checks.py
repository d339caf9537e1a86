"""Preflight checks: pure functions from a job and facts of this machine to findings of one line, with a remedy.

Errors stop the launch before anything starts; warnings are only printed. Faults that prevent resolving a job at all (no
plan, an unknown model) raise earlier, some of them in `refusals`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError
from fcp_cli.launching import memory_check, software
from fcp_cli.launching.commands import path_of_python
from fcp_cli.launching.environment import COMMUNICATORS, HCCL_BUFFERS, HCCL_PORTS
from fcp_cli.launching.job import LEAD_SECONDS, THIS_MACHINE, Job, planned_cluster
from fcp_cli.launching.memory_check import job_memory
from fcp_cli.launching.software import error, number, warning
from fcp_cli.memory.items import RESERVE_FRACTION
from fcp_cli.models.cluster import known_cluster
from fcp_cli.models.model import known_model, load_model
from fcp_cli.plan.replan_command import plan_again
from fcp_cli.util import network
from fcp_cli.util.findings import Finding
from fcp_cli.util.machine import VISIBLE_DEVICES, Facts, collect_facts, has_driver_files
from fcp_cli.util.network import is_loopback

# Checks that the plan matches the actual nodes, model and memory.

_OPEN_FILES_PER_RANK = 4  # sockets per peer: gloo pairs of two groups, and the store
_OPEN_FILES_BESIDE = 512  # for everything else in a rank
_HCCL_SHARE = 0.1  # share of device memory that communication buffers may take without a warning
_REPLICAS_APART = "--use-tp-pp-dp-mapping"


def node_size(job: Job, facts: Facts) -> Iterator[Finding]:
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


def profile_model(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that the plan's times and token budget are for the model that runs."""
    profile = job.profile
    if profile is not None and job.model is not None and _model_name(profile.model) != _model_name(job.model):
        again = f" a profile from 'fcp profile --model {job.model}'"
        if profile.origin == "analytic" and known_model(job.model) is None:
            again = f" --model {job.model} on a machine that has it"
        elif profile.origin == "analytic":
            again = f": {plan_again(job.metadata, job.plan, model=job.model)}"
        yield warning(
            f"{job.plan} was made with the cost profile of {profile.model}, not of {job.model}: its times and token "
            f"budget are another model's; plan again with{again}"
        )


def planned_machine(job: Job, facts: Facts) -> Iterator[Finding]:
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


def token_budget(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that a plan without a recipe fits into a device, by the memory block of its cost profile.

    `memory_check.rank_memory` covers plans with a recipe. Without --model, a script's model defaults to the plan's, as
    the message says.
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
    is_certain = profile.is_measured and job.model is not None
    yield (error if is_certain else warning)(
        f"{job.plan} lets a rank hold {job.metadata.tokens_per_rank:,} tokens, {needed / 1e9:.1f} GB with {model}, "
        f"but a device here has {capacity / 1e9:.1f} GB; {remedy}"
    )


def hccl_buffers(job: Job, facts: Facts) -> Iterator[Finding]:
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


def open_files(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check the open file limit: every rank has sockets to all others."""
    processes = job.num_nodes * job.processes_per_node
    needed = _OPEN_FILES_BESIDE + _OPEN_FILES_PER_RANK * processes
    if 0 < facts.open_files < needed:
        yield warning(
            f"a process may open {facts.open_files} files, but a rank of {processes} may need {needed}; "
            f"raise it with: ulimit -n {needed}"
        )


def _model_name(model: str) -> str:
    """Return a model's name as in cost profiles, which is independent of the checkpoint's path."""
    try:
        return load_model(model).name
    except ProfileError:
        return model


def _knows_memory(profile: CostProfile, job: Job) -> bool:
    """Return whether the profile's memory block applies: an accelerator job whose model is not known to differ."""
    is_this = job.model is None or _model_name(profile.model) == _model_name(job.model)
    return job.stack != "cpu" and is_this and profile.memory.bytes_per_token > 0


# Checks for environment variables that break a job.

_LEAST_CONNECT_SECONDS = 300


def hccl_timeouts(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that HCCL timeouts are long enough for start-up and for stragglers."""
    if job.stack != "npu":
        return
    connect, execute = number(facts, "HCCL_CONNECT_TIMEOUT"), number(facts, "HCCL_EXEC_TIMEOUT")
    if connect is not None and connect < _LEAST_CONNECT_SECONDS:
        yield warning(
            f"HCCL_CONNECT_TIMEOUT={connect:.0f} s is short for ranks that load a model first; export at least "
            f"{_LEAST_CONNECT_SECONDS}, or unset it"
        )
    if connect is not None and execute is not None and connect > execute:
        yield warning(
            f"HCCL_CONNECT_TIMEOUT={connect:.0f} is above HCCL_EXEC_TIMEOUT={execute:.0f}: a slow start would be "
            "mistaken for a hang; export the second at least as large as the first"
        )


def visible_devices(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that each process has a visible device."""
    name = VISIBLE_DEVICES.get(job.stack, "")
    value = facts.variables.get(name)
    if value is None or job.node_rank is None:
        return
    count = len([device for device in value.split(",") if device.strip()])
    if count < job.processes_per_node:
        yield error(
            f"{name}={value} shows {count} devices, but {job.processes_per_node} processes run on this node; unset it, "
            f"or plan for {count // job.metadata.devices_per_rank} ranks per node"
        )


def backend_autoload(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that torch autoloads torch_npu, which Ascend devices require."""
    if job.stack == "npu" and facts.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield warning(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu; unset it, or import torch_npu in the "
            "script"
        )


# Checks that the nodes of a job can reach each other.

_INTERFACE_VARIABLES = {
    "cpu": ("GLOO_SOCKET_IFNAME",),
    "cuda": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "npu": ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
}


def master_address(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that --master-addr is node 0's address, as seen from every node."""
    where = f"--master-addr {job.master_addr}"
    if job.num_nodes > 1 and (job.master_addr == "localhost" or is_loopback(job.master_addr)):
        yield error(f"{where} is another machine on each of {job.num_nodes} nodes; give node 0's address")
        return
    if job.num_nodes == 1 or job.node_rank is None:
        return
    if not facts.master_addresses:
        yield error(f"{where} is unknown on {facts.host}; give an IP address, or a name that every node can resolve")
    elif all(map(is_loopback, facts.master_addresses)):
        yield error(
            f"{where} is {facts.master_addresses[0]} on {facts.host}, which is another machine on each of "
            f"{job.num_nodes} nodes; give node 0's address on the network between nodes"
        )
    elif facts.way_problem:
        yield error(
            f"{where} cannot be reached from {facts.host}: {facts.way_problem}; give node 0's address on the network "
            f"between nodes, and let port {job.master_port} through its firewall"
        )
    elif job.node_rank == 0 and not facts.master_is_here:
        yield warning(
            f"{where} is no address of {facts.host}, but --node-rank 0 makes this node 0; give this machine's address, "
            "or the right --node-rank"
        )
    elif job.node_rank > 0 and facts.master_is_here:
        yield warning(
            f"{where} is this machine, {facts.host}, but --node-rank is {job.node_rank}; only node 0 has that address"
        )


def master_port(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that node 0 can listen on the master port."""
    if job.num_nodes == 1 or job.node_rank != 0:
        return
    if facts.port_problem:
        yield error(
            f"--master-port {job.master_port} of {facts.host} is {facts.port_problem}; give all nodes another one, "
            f"or find who has it with: ss -ltnp 'sport = :{job.master_port}'"
        )


def hccl_ports(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that the rendezvous port is not one of HCCL's."""
    base = number(facts, "HCCL_IF_BASE_PORT")
    if job.stack == "npu" and base is not None and base <= job.master_port < base + HCCL_PORTS:
        yield error(
            f"--master-port {job.master_port} is one of HCCL's own: HCCL_IF_BASE_PORT={base:.0f} takes {HCCL_PORTS} "
            f"ports; give a --master-port outside {base:.0f} to {base + HCCL_PORTS - 1:.0f}"
        )


def interfaces(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that communication libraries use existing network interfaces that reach the other nodes."""
    if job.num_nodes == 1 or job.node_rank is None:
        return
    names = _INTERFACE_VARIABLES.get(job.stack, ())
    chosen = {name: facts.variables[name] for name in names if name in facts.variables}
    known = ", ".join(facts.interfaces)
    for name, value in chosen.items():
        matching = _matching(value, facts.interfaces)
        if facts.interfaces and not matching:
            yield error(f"{name}={value} is no interface of {facts.host}, which has {known}; export one of them")
        elif matching and all(interface == "lo" for interface in matching):
            yield error(
                f"{name}={value} is the loopback interface, which reaches no other node; export another of {known}"
            )
    for name in names:
        if name not in chosen:
            yield warning(f"{name} is not set, and no route to {job.master_addr} shows it; export it on every node")
    # Ascend's libraries must agree; NCCL over ib0 beside gloo over eth0 is usual.
    if job.stack == "npu" and len({value.removeprefix("=") for value in chosen.values()}) > 1:
        both = ", ".join(f"{name}={value}" for name, value in chosen.items())
        yield warning(f"the nodes talk over different interfaces ({both}); export the same one in all of them")


def _matching(value: str, known: Sequence[str]) -> list[str]:
    """Return the interfaces selected by a *_SOCKET_IFNAME: prefixes, `=` for exact names, `^` to exclude."""
    excludes = value.startswith("^")
    wanted = value.removeprefix("^").split(",")

    def is_meant(interface: str) -> bool:
        return any(
            interface == name[1:] if name.startswith("=") else interface.startswith(name) for name in wanted if name
        )

    return [interface for interface in known if is_meant(interface) != excludes]


def slurm_nodes(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that a job in a Slurm allocation uses all its nodes."""
    allocated = number(facts, "SLURM_NNODES")
    if allocated is not None and job.node_rank is not None and allocated != job.num_nodes:
        yield warning(
            f"Slurm allocated {allocated:.0f} nodes, but the job runs on {job.num_nodes}; give --nodes "
            f"{allocated:.0f}, or submit with --nodes={job.num_nodes}"
        )


def time_to_stop(job: Job, facts: Facts) -> Iterator[Finding]:
    """Check that a stopped job has the time to end its longest step and to write a checkpoint."""
    given = [(f"--grace {job.grace_seconds}", job.grace_seconds, job.needed_grace_seconds)]
    for option in job.values.get("sbatch_options", ()):
        lead = re.fullmatch(r"--signal[= ]\S*@(\d+)", option)
        given += [(f"--sbatch-option={option}", int(lead[1]), job.grace_seconds + LEAD_SECONDS)] if lead else []
    for option, seconds, needed in given:
        if seconds < needed:
            yield warning(
                f"{option} is less than the {needed} s that the plan's longest step, a checkpoint and the job's end "
                "may take: a stop would lose the steps since the last checkpoint; leave it out"
            )


CHECKS = (
    time_to_stop,
    master_address,
    master_port,
    hccl_ports,
    interfaces,
    slurm_nodes,
    node_size,
    profile_model,
    planned_machine,
    memory_check.rank_memory,
    memory_check.host_copies,
    token_budget,
    hccl_buffers,
    open_files,
    hccl_timeouts,
    visible_devices,
    backend_autoload,
    software.cann,
    software.torch_versions,
    software.transformers_version,
    software.msrun,
    software.script_arguments,
    software.recipe_arguments,
)

_WAY_SECONDS = 10.0


def check_launch(job: Job, facts: Facts) -> list[Finding]:
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
    )
