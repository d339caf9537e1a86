"""Checks that the nodes of a job can reach each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fcp_cli.launching.checks.finding import LaunchFinding, error, number, warning
from fcp_cli.launching.job.environment import HCCL_PORTS
from fcp_cli.launching.job.job import Job
from fcp_cli.machine.facts import Facts
from fcp_cli.machine.network import is_loopback

_INTERFACE_VARIABLES = {
    "cpu": ("GLOO_SOCKET_IFNAME",),
    "cuda": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "npu": ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
}


def master_address(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
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


def master_port(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that node 0 can listen on the master port."""
    if job.num_nodes == 1 or job.node_rank != 0:
        return
    if facts.port_problem:
        yield error(
            f"--master-port {job.master_port} of {facts.host} is {facts.port_problem}; give all nodes another one, "
            f"or find who has it with: ss -ltnp 'sport = :{job.master_port}'"
        )
    elif job.master_port < 1024:
        yield warning(f"--master-port {job.master_port} is one that only root may use; give one from 1024 to 32767")


def hccl_ports(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that the rendezvous port is not one of HCCL's."""
    base = number(facts, "HCCL_IF_BASE_PORT")
    if job.stack == "npu" and base is not None and base <= job.master_port < base + HCCL_PORTS:
        yield error(
            f"--master-port {job.master_port} is one of HCCL's own: HCCL_IF_BASE_PORT={base:.0f} takes {HCCL_PORTS} "
            f"ports; give a --master-port outside {base:.0f} to {base + HCCL_PORTS - 1:.0f}"
        )


def hosts(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that the host list has no duplicates, contains this node, and starts with node 0."""
    if not job.hosts:
        return
    twice = next((host for host in job.hosts if job.hosts.count(host) > 1), None)
    if twice is not None:
        yield error(f"{twice} is listed {job.hosts.count(twice)} times among the hosts; name each node once")
    if len(job.hosts) != job.num_nodes:
        yield error(f"{len(job.hosts)} hosts are listed for {job.num_nodes} nodes; list each node once")
    if job.master_addr and job.master_addr != job.hosts[0]:
        yield error(
            f"--master-addr {job.master_addr} is not the first of the hosts, {job.hosts[0]}; remove --master-addr, "
            "or list node 0 first"
        )
    if job.node_rank is not None and not facts.hosts_here:
        yield error(f"this machine, {facts.host}, is none of the hosts ({', '.join(job.hosts)}); list its address")
    elif job.node_rank is not None and job.node_rank not in facts.hosts_here:
        yield error(
            f"--node-rank is {job.node_rank}, but this machine, {facts.host}, is host {facts.hosts_here[0]} of the "
            f"list; give --node-rank {facts.hosts_here[0]}"
        )


def interfaces(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
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
    if len({value.removeprefix("=") for value in chosen.values()}) > 1:
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


def slurm_nodes(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that a job in a Slurm allocation uses all its nodes."""
    allocated = number(facts, "SLURM_NNODES")
    if allocated is not None and job.node_rank is not None and allocated != job.num_nodes:
        yield warning(
            f"Slurm allocated {allocated:.0f} nodes, but the job runs on {job.num_nodes}; give --nodes "
            f"{allocated:.0f}, or submit with --nodes={job.num_nodes}"
        )
