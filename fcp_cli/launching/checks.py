"""The preflight: pure functions from a job and the facts of this machine to findings, each one line with its mend.

Errors stop the launch before anything starts; warnings are shown and the job runs. What makes a launch impossible to
describe at all (no plan, an unknown model) raises earlier, in `preflight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import ProfileError
from fcp_cli.launching.environment import COMMUNICATORS, HCCL_BUFFERS, HCCL_PORTS
from fcp_cli.launching.facts import Facts
from fcp_cli.launching.job import Job, argument
from fcp_cli.launching.machine import VISIBLE_DEVICES
from fcp_cli.launching.msrun import interpreter_name
from fcp_cli.launching.network import is_loopback
from fcp_cli.profiling.memory import RESERVE_FRACTION
from fcp_cli.profiling.models import load_model

_LEAST_TORCH = (2, 7)
_LEAST_TRANSFORMERS = (4, 56)
_LEAST_CONNECT_SECONDS = 300
_OPEN_FILES_PER_RANK = 4  # a rank's sockets to another: gloo pairs of two groups, the store
_OPEN_FILES_BESIDE = 512
_HCCL_SHARE = 0.1  # of a device's memory that communication buffers may take without a word
_INTERFACE_VARIABLES = {
    "cpu": ("GLOO_SOCKET_IFNAME",),
    "cuda": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "npu": ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
}
_PARALLEL_ARGUMENTS = {
    "--tensor-model-parallel-size": "tensor_parallel",
    "--pipeline-model-parallel-size": "pipeline_parallel",
}
_REPLICAS_APART = "--use-tp-pp-dp-mapping"
_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, and how to mend it, in one line."""

    severity: Literal["error", "warning"]
    message: str


def check_launch(job: Job, facts: Facts) -> list[Finding]:
    """Everything that is wrong, errors first."""
    found = [finding for check in CHECKS for finding in check(job, facts)]
    return sorted(found, key=lambda finding: finding.severity)


def _error(message: str) -> Finding:
    return Finding(severity="error", message=message)


def _warning(message: str) -> Finding:
    return Finding(severity="warning", message=message)


# Nodes


def master_address(job: Job, facts: Facts) -> Iterator[Finding]:
    """All nodes must mean the same machine by --master-addr, and node 0 must be it."""
    where = f"--master-addr {job.master_addr}"
    if job.num_nodes > 1 and (job.master_addr == "localhost" or is_loopback(job.master_addr)):
        yield _error(f"{where} is another machine on each of {job.num_nodes} nodes; give node 0's address")
        return
    if job.num_nodes == 1 or job.node_rank is None:
        return
    if not facts.master_addresses:
        yield _error(f"{where} is unknown on {facts.host}; give an IP address, or a name that every node can resolve")
    elif all(map(is_loopback, facts.master_addresses)):
        yield _error(
            f"{where} is {facts.master_addresses[0]} on {facts.host}, which is another machine on each of "
            f"{job.num_nodes} nodes; give node 0's address on the network between nodes"
        )
    elif facts.way_problem:
        yield _error(
            f"{where} cannot be reached from {facts.host}: {facts.way_problem}; give node 0's address on the network "
            f"between nodes, and let port {job.master_port} through its firewall"
        )
    elif job.node_rank == 0 and not facts.master_is_here:
        yield _warning(
            f"{where} is no address of {facts.host}, but --node-rank 0 makes this node 0; give this machine's address, "
            "or the right --node-rank"
        )
    elif job.node_rank > 0 and facts.master_is_here:
        yield _warning(
            f"{where} is this machine, {facts.host}, but --node-rank is {job.node_rank}; only node 0 has that address"
        )


def master_port(job: Job, facts: Facts) -> Iterator[Finding]:
    """Node 0 must be able to listen."""
    if job.num_nodes == 1 or job.node_rank != 0:
        return
    if facts.port_problem:
        yield _error(
            f"--master-port {job.master_port} of {facts.host} is {facts.port_problem}; give all nodes another one, "
            f"or find who has it with: ss -ltnp 'sport = :{job.master_port}'"
        )
    elif job.master_port < 1024:
        yield _warning(f"--master-port {job.master_port} is one that only root may use; give one from 1024 to 32767")


def hccl_ports(job: Job, facts: Facts) -> Iterator[Finding]:
    """HCCL takes ports of its own."""
    base = _number(facts, "HCCL_IF_BASE_PORT")
    if job.stack == "npu" and base is not None and base <= job.master_port < base + HCCL_PORTS:
        yield _error(
            f"--master-port {job.master_port} is one of HCCL's own: HCCL_IF_BASE_PORT={base:.0f} takes {HCCL_PORTS} "
            f"ports; give a --master-port outside {base:.0f} to {base + HCCL_PORTS - 1:.0f}"
        )


def hosts(job: Job, facts: Facts) -> Iterator[Finding]:
    """A list of nodes names each once, this one among them, and node 0 first."""
    if not job.hosts:
        return
    twice = next((host for host in job.hosts if job.hosts.count(host) > 1), None)
    if twice is not None:
        yield _error(f"{twice} is listed {job.hosts.count(twice)} times among the hosts; name each node once")
    if len(job.hosts) != job.num_nodes:
        yield _error(f"{len(job.hosts)} hosts are listed for {job.num_nodes} nodes; list each node once")
    if job.master_addr and job.master_addr != job.hosts[0]:
        yield _error(
            f"--master-addr {job.master_addr} is not the first of the hosts, {job.hosts[0]}; leave --master-addr out, "
            "or list node 0 first"
        )
    if job.node_rank is not None and not facts.hosts_here:
        yield _error(f"this machine, {facts.host}, is none of the hosts ({', '.join(job.hosts)}); list its address")
    elif job.node_rank is not None and job.node_rank not in facts.hosts_here:
        yield _error(
            f"--node-rank is {job.node_rank}, but this machine, {facts.host}, is host {facts.hosts_here[0]} of the "
            f"list; give --node-rank {facts.hosts_here[0]}"
        )


def interfaces(job: Job, facts: Facts) -> Iterator[Finding]:
    """Communication libraries must use an interface that exists and leads to the other nodes."""
    if job.num_nodes == 1 or job.node_rank is None:
        return
    names = _INTERFACE_VARIABLES.get(job.stack, ())
    chosen = {name: facts.variables[name] for name in names if name in facts.variables}
    known = ", ".join(facts.interfaces)
    for name, value in chosen.items():
        matching = _matching(value, facts.interfaces)
        if facts.interfaces and not matching:
            yield _error(f"{name}={value} is no interface of {facts.host}, which has {known}; export one of them")
        elif matching and all(interface == "lo" for interface in matching):
            yield _error(
                f"{name}={value} is the loopback interface, which reaches no other node; export another of {known}"
            )
    for name in names:
        if name not in chosen:
            yield _warning(f"{name} is not set, and no route to {job.master_addr} tells it; export it on every node")
    if len(set(chosen.values())) > 1:
        both = ", ".join(f"{name}={value}" for name, value in chosen.items())
        yield _warning(f"the nodes talk over different interfaces ({both}); export the same one in all of them")


def _matching(value: str, known: Sequence[str]) -> list[str]:
    """The interfaces that a *_SOCKET_IFNAME means: names or beginnings, `=` for a whole name, `^` for all others."""
    excludes = value.startswith("^")
    wanted = value.removeprefix("^").split(",")

    def is_meant(interface: str) -> bool:
        return any(
            interface == name[1:] if name.startswith("=") else interface.startswith(name) for name in wanted if name
        )

    return [interface for interface in known if is_meant(interface) != excludes]


def slurm_nodes(job: Job, facts: Facts) -> Iterator[Finding]:
    """Inside an allocation, its nodes are the job's."""
    allocated = _number(facts, "SLURM_NNODES")
    if allocated is not None and job.node_rank is not None and allocated != job.num_nodes:
        yield _warning(
            f"Slurm allocated {allocated:.0f} nodes, but the job runs on {job.num_nodes}; give --nodes "
            f"{allocated:.0f}, or submit with --nodes={job.num_nodes}"
        )


# Plan and memory


def node_size(job: Job, facts: Facts) -> Iterator[Finding]:
    """Rings that the plan keeps inside a node must stay there.

    Megatron makes processes of one stage neighbours, whatever rank they are of; with --use-tp-pp-dp-mapping, those of
    one rank.
    """
    metadata = job.metadata
    neighbours = metadata.tensor_parallel
    if _REPLICAS_APART in job.arguments:
        neighbours *= metadata.pipeline_parallel
    here = max(1, min(metadata.num_ranks, job.processes_per_node // neighbours))
    if job.num_nodes > 1 and here != metadata.ranks_per_node:
        yield _warning(
            f"{job.plan} counts {metadata.ranks_per_node} ranks per node, but {here} run on each of {job.num_nodes}: "
            f"its rings would cross nodes unseen; plan with --ranks-per-node {here}"
        )


def profile_model(job: Job, facts: Facts) -> Iterator[Finding]:
    """Times and token budget of a plan are those of one model."""
    profile = job.profile
    if profile is not None and job.model is not None and not _is_same_model(profile.model, job.model):
        yield _warning(
            f"{job.plan} was made with the cost profile of {profile.model}, not of {job.model}: its times and token "
            f"budget are another model's; plan again with a profile from 'fcp profile --model {job.model}'"
        )


def token_budget(job: Job, facts: Facts) -> Iterator[Finding]:
    """A rank's tokens and its model must fit the memory that is really there.

    What a script trains only its user knows, unless --model says it: on accelerators, the plan's model is a fair guess
    and told as one; on the CPU, where small models are tried under any plan, nothing is said.
    """
    profile, capacity = job.profile, _memory_of_a_rank(job, facts)
    if profile is None or not capacity or not _knows_memory(profile, job):
        return
    memory = profile.memory
    needed = memory.model_state_bytes + job.metadata.tokens_per_rank * memory.bytes_per_token
    if needed <= capacity:
        return
    room = replace(memory, capacity_bytes=capacity * (1 - RESERVE_FRACTION)).tokens_per_rank() or 0
    mend = f"plan with --tokens-per-rank {room}" if room > 0 else "the model alone is larger, so choose a smaller one"
    model = "the model" if job.model is not None else f"{profile.model}, the plan's model"
    where = "a rank's share of this machine" if job.stack == "cpu" else "a device here"
    # Computed figures are an estimate, and so is what a process of a host may take.
    is_certain = profile.origin in ("measured", "fitted") and job.stack != "cpu" and job.model is not None
    yield (_error if is_certain else _warning)(
        f"{job.plan} lets a rank hold {job.metadata.tokens_per_rank:,} tokens, {needed / 1e9:.1f} GB with {model}, "
        f"but {where} has {capacity / 1e9:.1f} GB; {mend}"
    )


def _memory_of_a_rank(job: Job, facts: Facts) -> int:
    """Bytes; 0 where they are not known."""
    if job.stack == "cpu" and facts.machine is not None:
        return facts.machine.memory_bytes // job.processes_per_node
    return facts.device_memory_bytes


def hccl_buffers(job: Job, facts: Facts) -> Iterator[Finding]:
    """Each communicator takes two buffers of HCCL_BUFFSIZE megabytes on every device."""
    size, capacity = _number(facts, "HCCL_BUFFSIZE"), facts.device_memory_bytes
    if job.stack != "npu" or size is None or not capacity:
        return
    total = COMMUNICATORS * HCCL_BUFFERS * size * (1 << 20)
    if total > _HCCL_SHARE * capacity:
        yield _warning(
            f"HCCL_BUFFSIZE={size:.0f} takes {total / 1e9:.1f} GB of each device's {capacity / 1e9:.0f} GB for "
            f"{COMMUNICATORS} communicators; unset it to let fcp choose"
        )
    groups = job.metadata.distinct_groups
    rings = groups * HCCL_BUFFERS * size * (1 << 20)
    if not job.is_bundled and rings > _HCCL_SHARE * capacity:
        yield _warning(
            f"{job.plan} has {groups} distinct groups: a framework that makes a communicator for each would take up to "
            f"{rings / 1e9:.0f} GB per device; plan with --max-groups, or use fcp_cli.runtime, which makes one for all"
        )


def open_files(job: Job, facts: Facts) -> Iterator[Finding]:
    """Every rank has sockets to every other."""
    processes = job.num_nodes * job.processes_per_node
    needed = _OPEN_FILES_BESIDE + _OPEN_FILES_PER_RANK * processes
    if 0 < facts.open_files < needed:
        yield _warning(
            f"a process may open {facts.open_files} files, but a rank of {processes} may need {needed}; "
            f"raise it with: ulimit -n {needed}"
        )


# Variables


def hccl_timeouts(job: Job, facts: Facts) -> Iterator[Finding]:
    """Ranks need time to connect, and to wait for slower ones."""
    if job.stack != "npu":
        return
    connect, execute = _number(facts, "HCCL_CONNECT_TIMEOUT"), _number(facts, "HCCL_EXEC_TIMEOUT")
    if connect is not None and connect < _LEAST_CONNECT_SECONDS:
        yield _warning(
            f"HCCL_CONNECT_TIMEOUT={connect:.0f} s is short for ranks that load a model first; export at least "
            f"{_LEAST_CONNECT_SECONDS}, or unset it"
        )
    if connect is not None and execute is not None and connect > execute:
        yield _warning(
            f"HCCL_CONNECT_TIMEOUT={connect:.0f} is above HCCL_EXEC_TIMEOUT={execute:.0f}: a slow start would be "
            "taken for a hang; export the second at least as large as the first"
        )


def device_connections(job: Job, facts: Facts) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS, which Ascend honours too."""
    value = facts.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if job.stack not in ("cuda", "npu") or value is None:
        return
    if job.metadata.sync == "microbatch" and job.metadata.devices_per_rank == 1 and value == "1":
        yield _warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 makes FSDP2 wait for its weights before each layer; export 2, or unset it"
        )
    if job.metadata.tensor_parallel > 1 and value != "1":
        yield _warning(
            f"CUDA_DEVICE_MAX_CONNECTIONS={value} breaks the order that tensor parallelism overlaps in; export 1"
        )


def blocking_launches(job: Job, facts: Facts) -> Iterator[Finding]:
    """Left over from debugging, they cost most of the speed."""
    name = {"cuda": "CUDA_LAUNCH_BLOCKING", "npu": "ASCEND_LAUNCH_BLOCKING"}.get(job.stack, "")
    if facts.variables.get(name) == "1":
        yield _warning(f"{name}=1 makes every kernel wait for the one before, so no hop is hidden; unset it")


def visible_devices(job: Job, facts: Facts) -> Iterator[Finding]:
    """One device per process."""
    name = VISIBLE_DEVICES.get(job.stack, "")
    value = facts.variables.get(name)
    if value is None or job.node_rank is None:
        return
    count = len([device for device in value.split(",") if device.strip()])
    if count < job.processes_per_node:
        yield _error(
            f"{name}={value} shows {count} devices, but {job.processes_per_node} processes run on this node; unset it, "
            f"or plan for {count // job.metadata.devices_per_rank} ranks per node"
        )


def thread_count(job: Job, facts: Facts) -> Iterator[Finding]:
    """Threads beyond the cores make ranks on a CPU slower, not faster."""
    threads = _number(facts, "OMP_NUM_THREADS")
    if job.stack != "cpu" or threads is None or facts.machine is None:
        return
    total = threads * job.processes_per_node
    if total > 2 * facts.machine.num_cores and threads > 1:
        yield _warning(
            f"OMP_NUM_THREADS={threads:.0f} x {job.processes_per_node} ranks = {total:.0f} threads on "
            f"{facts.machine.num_cores} cores; unset it to let fcp share the cores"
        )


def backend_autoload(job: Job, facts: Facts) -> Iterator[Finding]:
    """Without it, torch does not know Ascend devices."""
    if job.stack == "npu" and facts.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield _warning(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu; unset it, or import torch_npu in the "
            "script"
        )


# Software


def cann(job: Job, facts: Facts) -> Iterator[Finding]:
    """CANN's libraries are found only after its set_env.sh."""
    if job.stack != "npu" or job.node_rank is None:
        return
    if facts.cann_home is None:
        yield _error(f"ASCEND_HOME_PATH is not set: CANN was not sourced; run: {_SET_ENV}")
    elif not facts.has_hccl:
        yield _error(f"libhccl.so is not found though ASCEND_HOME_PATH is {facts.cann_home}; run: {_SET_ENV}")


def torch_versions(job: Job, facts: Facts) -> Iterator[Finding]:
    """torch is new enough, and torch_npu made for it."""
    if job.node_rank is None:
        return
    torch, torch_npu = facts.packages.get("torch"), facts.packages.get("torch-npu")
    if torch is not None and _release(torch) < _LEAST_TORCH:
        yield _error(f"torch {torch} is too old; fcp needs 2.7 or newer: pip install 'torch>=2.7'")
    if torch is not None and torch_npu is not None and _release(torch)[:3] != _release(torch_npu)[:3]:
        wanted = ".".join(map(str, _release(torch)[:3]))
        yield _error(f"torch_npu {torch_npu} is not made for torch {torch}; run: pip install 'torch_npu=={wanted}.*'")
    if torch is not None and torch_npu is None and job.stack == "npu" and job.needs_torch:
        yield _error("torch_npu is not installed; run: pip install 'fcp-cli[npu]'")


def transformers_version(job: Job, facts: Facts) -> Iterator[Finding]:
    """What the bundled trainer builds its models with."""
    found = facts.packages.get("transformers")
    if job.is_bundled and job.node_rank is not None and found is not None and _release(found) < _LEAST_TRANSFORMERS:
        yield _error(f"transformers {found} is too old for the bundled trainer; run: pip install 'transformers>=4.56'")


def msrun(job: Job, facts: Facts) -> Iterator[Finding]:
    """msrun runs the `python` of PATH, not its own."""
    if job.launcher != "msrun" or job.node_rank is None:
        return
    if facts.programs.get("msrun") is None:
        yield _error(
            "msrun is neither beside this Python nor on PATH; it comes with MindSpore: pip install 'fcp-cli[mindspore]'"
        )
    name = interpreter_name(facts.python)
    python = facts.programs.get(name)
    if python is None or not _is_same_file(python, facts.python):
        yield _error(
            f"msrun runs the {name} of PATH, which is {python or 'missing'}, not {facts.python}; run fcp from an "
            f"environment whose folder has a {name}: python3 -m venv makes one"
        )


def pdsh(job: Job, facts: Facts) -> Iterator[Finding]:
    """MindSpeed-MM's own multi-node start hangs without it."""
    if job.stack == "npu" and job.num_nodes > 1 and not job.is_bundled and facts.programs.get("pdsh") is None:
        yield _warning("pdsh is not installed, and MindSpeed-MM hangs without it on several nodes; install pdsh")


def script_arguments(job: Job, facts: Facts) -> Iterator[Finding]:
    """Options of Megatron and MindSpeed that cannot follow a plan, or not this one."""
    for flag, key in _PARALLEL_ARGUMENTS.items():
        given, planned = argument(job.arguments, flag), getattr(job.metadata, key)
        if given is not None and given.isdigit() and int(given) != planned:
            yield _error(
                f"the script has {flag} {given}, but {job.plan} was made for {planned}; plan with "
                f"--{key.replace('_', '-')} {given}, or launch the script with the plan's"
            )
    algorithm = argument(job.arguments, "--context-parallel-algo")
    if algorithm not in (None, "megatron_cp_algo"):
        yield _error(
            f"--context-parallel-algo {algorithm} keeps the groups of its start, so no plan can change them; use "
            "megatron_cp_algo"
        )
    size, length = argument(job.arguments, "--context-parallel-size"), argument(job.arguments, "--seq-length")
    if size is None or length is None or not (size.isdigit() and length.isdigit()):
        return
    if int(size) > 1 and int(length) % (2 * int(size)):
        yield _error(
            f"--seq-length {length} is not divisible by 2 x --context-parallel-size {size}, which MindSpeed demands at "
            f"its start; use {int(length) // (2 * int(size)) * 2 * int(size) or 2 * int(size)}"
        )


CHECKS = (
    master_address,
    master_port,
    hccl_ports,
    hosts,
    interfaces,
    slurm_nodes,
    node_size,
    profile_model,
    token_budget,
    hccl_buffers,
    open_files,
    hccl_timeouts,
    device_connections,
    blocking_launches,
    visible_devices,
    thread_count,
    backend_autoload,
    cann,
    torch_versions,
    transformers_version,
    msrun,
    pdsh,
    script_arguments,
)


def _number(facts: Facts, name: str) -> float | None:
    try:
        return float(facts.variables[name])
    except (KeyError, ValueError):
        return None


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 2.7.1.post2+cpu is (2, 7, 1)."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _is_same_model(first: str, second: str) -> bool:
    try:
        return load_model(first).name == load_model(second).name
    except ProfileError:
        return first == second


def _knows_memory(profile: CostProfile, job: Job) -> bool:
    """Whether the profile's memory figures are those of the model that runs, as far as anybody can tell."""
    is_this = job.stack != "cpu" if job.model is None else _is_same_model(profile.model, job.model)
    return is_this and profile.memory.bytes_per_token > 0


def _is_same_file(first: str, second: str) -> bool:
    """Whether two paths are one interpreter: the same folder, so that a link out of another environment is not."""
    return Path(first).absolute().parent == Path(second).absolute().parent
