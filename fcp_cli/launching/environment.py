"""Environment variables for each device kind, with reasons. Pure functions of a job.

Variables exported by the user take precedence; `launching/checks.py` warns about harmful values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fcp_cli.cost.recipe import KERNEL_VARIABLE as KERNEL_VARIABLE
from fcp_cli.errors import ProfileError
from fcp_cli.launching.job import (
    JOIN_VARIABLE,
    METRICS_VARIABLE,
    MODEL_VARIABLE,
    ONLINE_VARIABLE,
    PLAN_VARIABLE,
    RUN_DIR_VARIABLE,
    TIMEOUT_VARIABLE,
    Job,
    Variable,
    argument,
    planned_profile,
    unmade_plan,
)
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import known_model
from fcp_cli.plan.metadata import OTHER_BATCHES_VARIABLE, Sync
from fcp_cli.util.machine import LocalDevices

if TYPE_CHECKING:
    from rich.table import Table


# Communicators of a planned job: torch.distributed's own, and one for all rings.
COMMUNICATORS = 2
# HCCL has a send and a receive buffer per communicator.
HCCL_BUFFERS = 2
HCCL_PORTS = 16
_HCCL_DEFAULT_MB = 200
_HCCL_LEAST_MB = 32
_HCCL_MOST_MB = 400
_HCCL_SHARE = 0.05  # share of device memory for all communicators
_HCCL_BASE_PORT = 25_809
_MEGABYTE = 1 << 20
_CHANNEL_BYTES_PER_SECOND = 25e9  # over NVLink, estimated: 20 to 25e9
_MOST_CHANNELS = 8  # their thread blocks take as many multiprocessors from attention
_FLIGHT_RECORDS = 2000  # a few steps of ring hops, about 1 kB of host memory each
_LIBRARIES = {"cuda": ("NCCL_", "TORCH_NCCL_", "FI_", "UCX_", "LD_LIBRARY_PATH"), "npu": ("HCCL_", "LD_LIBRARY_PATH")}
_OF_ONE_PROCESS = ("_COMM_ID",)  # rendezvous of one running job: must not be copied to another
_YOURS = "your environment"


def job_variables(job: Job, given: Mapping[str, str], *, interface: str | None = None) -> tuple[Variable, ...]:
    """Return all variables for the job's device kind, in the order of `--explain`.

    Args:
        job: the job to launch.
        given: the user's environment, which takes precedence.
        interface: this machine's network interface towards node 0; None: each node finds its own.
    """
    of_stack = {"cuda": _cuda, "npu": _ascend}.get(job.stack)
    wanted = [*_common(job, interface), *(of_stack(job, interface) if of_stack else ())]
    # If the user enables NCCL's log, keep its default location.
    unwanted = {"NCCL_DEBUG_FILE"} if "NCCL_DEBUG" in given and "NCCL_DEBUG_FILE" not in given else set()
    known = tuple(_respecting(variable, given) for variable in wanted if variable.name not in unwanted)
    names = {variable.name for variable in wanted}
    # All other exported variables of the communication library.
    exported = (
        Variable(name=name, value=value, reason="exported where the job is launched", source=_YOURS, is_given=True)
        for name, value in sorted(given.items())
        if name.startswith(_LIBRARIES.get(job.stack, ())) and not name.endswith(_OF_ONE_PROCESS) and name not in names
    )
    return (*known, *exported)


def variables_like_a_job(
    machine: LocalDevices,
    given: Mapping[str, str],
    *,
    model: str,
    sync: Sync,
    ranks: int,
    nodes: int,
    tokens_per_rank: int,
    cluster: str,
) -> tuple[Variable, ...]:
    """Return the variables of a bundled-trainer job with a rank per device, without launching it.

    Args:
        machine: device kind and cores.
        given: the user's environment, which takes precedence.
        model: shipped name or description; its key-value size determines buffer sizes.
        sync: sync of the plan.
        ranks: total number of ranks.
        nodes: number of nodes; if several, interface variables have no value, since each node finds its own.
        tokens_per_rank: token budget.
        cluster: name or description of the cluster.
    """
    metadata = unmade_plan(ranks=ranks, ranks_per_node=ranks // nodes, sync=sync, tokens_per_rank=tokens_per_rank)
    metadata = replace(metadata, cost_profile=json.dumps({"model": model, "cluster": cluster}))
    job = Job(
        plan=Path(),
        metadata=metadata,
        machine=machine,
        run_dir=Path(),
        num_nodes=nodes,
        processes_per_node=ranks // nodes,
        model=model,
    )
    return job_variables(job, given)


def set_by_fcp(variables: Sequence[Variable]) -> dict[str, str]:
    """Return the variables that fcp adds to the user's environment."""
    return {variable.name: variable.value for variable in variables if variable.value and not variable.is_given}


def _respecting(variable: Variable, given: Mapping[str, str]) -> Variable:
    value = given.get(variable.name)
    if value is None:
        return variable
    source = _YOURS if value == variable.value else f"{_YOURS}; fcp would set {variable.value}"
    return replace(variable, value=value, source=source, is_given=True)


def _common(job: Job, interface: str | None) -> Iterator[Variable]:
    if job.rank_timeout_seconds is not None:
        yield Variable(
            name=TIMEOUT_VARIABLE,
            value=str(job.rank_timeout_seconds),
            reason="seconds that ranks wait for each other before the job fails",
            source="--rank-timeout",
        )
    if job.num_nodes > 1 and job.join_timeout_seconds is not None and job.launcher == "torchrun":
        yield Variable(
            name=JOIN_VARIABLE,
            value=str(job.join_timeout_seconds),
            reason="seconds that ranks wait for the store of node 0, which torch would wait for as long as for a rank",
            source="--join-timeout",
        )
    if job.attention_kernel != "auto":
        yield Variable(
            name=KERNEL_VARIABLE,
            value=job.attention_kernel,
            reason="attention kernel, for all calls that it takes",
            source="--attention-kernel",
        )
    if job.stack == "cpu" and job.num_nodes == 1:
        yield Variable(
            name="OMP_NUM_THREADS",
            value=str(job.machine.threads_per_rank(job.processes_per_node)),
            reason="threads of a rank; torchrun would give it one",
            source=f"{job.machine.num_cores} cores over {job.processes_per_node} ranks",
        )
    if job.num_nodes > 1:
        yield _interface("GLOO_SOCKET_IFNAME", interface, job, "gloo")


def interface_value(variable: str, interface: str) -> str:
    """Return the value that selects exactly this interface: NCCL treats a plain name as a prefix."""
    return f"={interface}" if variable == "NCCL_SOCKET_IFNAME" else interface


def _interface(name: str, interface: str | None, job: Job, user: str) -> Variable:
    where = "this machine's" if interface else "each node's own"
    return Variable(
        name=name,
        value=interface_value(name, interface) if interface else "",
        reason=f"the network between nodes, for {user}",
        source=f"{where} route to {job.master_addr}",
    )


def wants_one_queue(job: Job) -> tuple[str, str] | None:
    """Return (reason, source) if a job's devices need a single hardware queue, else None.

    A single queue starts kernels in launch order, which tensor parallelism needs for overlap. Other jobs are slower
    with it, because rings, reductions and attention on independent streams are serialized.
    """
    if job.metadata.tensor_parallel > 1:
        return "tensor parallelism overlaps in the order of launch", "the plan's tensor parallel ranks"
    static = argument(job.arguments, "--context-parallel-size") or ""
    if static.isdecimal() and int(static) > 1:
        return "Megatron demands it with context parallelism", "the script's --context-parallel-size"
    return None


def _connections(job: Job) -> Iterator[Variable]:
    if wanted := wants_one_queue(job):
        yield Variable(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", reason=wanted[0], source=wanted[1])


def _cuda(job: Job, interface: str | None) -> Iterator[Variable]:
    yield from _connections(job)
    yield Variable(
        name="PYTORCH_CUDA_ALLOC_CONF",
        value="expandable_segments:True",
        reason="micro-batches of changing sizes would fragment device memory",
        source="fcp's default for CUDA",
    )
    yield from _nccl_logs(job)
    if job.num_nodes > 1:
        yield _interface("NCCL_SOCKET_IFNAME", interface, job, "NCCL's bootstrap")
        yield from _channels(job)


def _channels(job: Job) -> Iterator[Variable]:
    """Yield the channels of messages, each a thread block with buffers, on several nodes of NVLink.

    All peers of a communicator get the least number of any pair (NCCL's src/graph/paths.cc). A remote peer has 2, or 1
    among many ranks, up to 2.28, and one per 14 GB/s of its adapters from 2.29 on, but peers in a single node up to 32.
    The variable holds for all communicators: all-to-alls of experts would open as many buffers to each of their peers.
    """
    planned = planned_profile(job.metadata)
    model = known_model(str(planned.get("model") or ""))
    with suppress(ProfileError):
        cluster = load_cluster(str(planned.get("cluster") or ""))
        needed = cluster.intra_node_bytes_per_second / _CHANNEL_BYTES_PER_SECOND
        channels = min(_MOST_CHANNELS, 1 << math.ceil(math.log2(max(needed, 1.0))))
        if channels > 2 and cluster.device.startswith("NVIDIA") and model is not None and model.experts is None:
            yield Variable(
                name="NCCL_NCHANNELS_PER_NET_PEER",
                value=str(channels),
                reason="channels of a message; in nodes, too, NCCL would use as few as its network needs, 1 to 4",
                source=f"NVLink of {cluster.name}, {channels} of {math.ceil(needed)} channels that fill it",
            )


def _nccl_logs(job: Job) -> Iterator[Variable]:
    """Yield variables that write NCCL's logs and flight records of hangs to the run directory, not to local disks."""
    logs = job.paths.logs
    reasons = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "every rank writes its latest collectives where one timed out"),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": (str(_FLIGHT_RECORDS), "how many of a rank's latest collectives are kept"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": (str(logs / "flight-recorder-"), "where they are written; the rank follows"),
        "NCCL_DEBUG": ("WARN", "NCCL says why it fails"),
        "NCCL_DEBUG_FILE": (str(logs / "nccl-%h-%p.log"), "where NCCL says so: host and process follow"),
    }
    for name, (value, reason) in reasons.items():
        if job.run_dir.is_absolute() or not name.endswith("_FILE"):  # `fcp profile` has no run directory
            yield Variable(name=name, value=value, reason=reason, source="fcp's default for CUDA")


def _ascend(job: Job, interface: str | None) -> Iterator[Variable]:
    yield from _connections(job)
    yield from _ASCEND_CONSTANTS
    yield _hccl_buffer(job)
    yield _hccl_port(job)
    if job.num_nodes > 1:
        yield _interface("HCCL_SOCKET_IFNAME", interface, job, "HCCL's bootstrap")
        yield _interface("TP_SOCKET_IFNAME", interface, job, "torch_npu's store")


def _ascend_constant(name: str, value: str, reason: str) -> Variable:
    return Variable(name=name, value=value, reason=reason, source="fcp's default for Ascend")


_ASCEND_CONSTANTS = (
    _ascend_constant("HCCL_CONNECT_TIMEOUT", "1200", "seconds for all ranks to connect; 120, its default, is too few"),
    _ascend_constant("HCCL_EXEC_TIMEOUT", "3600", "seconds that a rank may wait for a slower one; not below the above"),
    _ascend_constant(
        "PYTORCH_NPU_ALLOC_CONF",
        "expandable_segments:True",
        "micro-batches of changing sizes would fragment device memory",
    ),
    _ascend_constant("TASK_QUEUE_ENABLE", "2", "operators are queued by a second thread; most per second"),
    _ascend_constant("CPU_AFFINITY_CONF", "1", "each rank's threads stay on cores near its device"),
    _ascend_constant("ACLNN_CACHE_LIMIT", "100000", "operators of changing shapes are found again"),
    _ascend_constant("ASCEND_GLOBAL_LOG_LEVEL", "3", "CANN logs errors only"),
    _ascend_constant("ASCEND_SLOG_PRINT_TO_STDOUT", "0", "CANN's log stays out of the ranks' output"),
)


def _hccl_buffer(job: Job) -> Variable:
    """Return HCCL_BUFFSIZE to fit one ring hop, limited to 5 % of device memory over all communicators."""
    hop, profile = job.hop_bytes, job.profile
    megabytes = _HCCL_DEFAULT_MB if hop is None else min(max(math.ceil(hop / _MEGABYTE), _HCCL_LEAST_MB), _HCCL_MOST_MB)
    capacity = profile.memory.capacity_bytes if profile is not None else 0.0
    if capacity:
        affordable = int(_HCCL_SHARE * capacity / (COMMUNICATORS * HCCL_BUFFERS * _MEGABYTE))
        megabytes = max(1, min(megabytes, affordable))
    source = (
        "HCCL's own default: the model's keys and values are not known"
        if hop is None
        else f"a ring's hop of {hop / _MEGABYTE:.0f} MB at {job.metadata.tokens_per_rank:,} tokens per rank"
    )
    total = COMMUNICATORS * HCCL_BUFFERS * megabytes
    return Variable(
        name="HCCL_BUFFSIZE",
        value=str(megabytes),
        reason=f"MB of a buffer; each of the plan's {COMMUNICATORS} communicators has {HCCL_BUFFERS}",
        source=f"{source}; {total} MB per device in all",
    )


def _hccl_port(job: Job) -> Variable:
    base = _HCCL_BASE_PORT
    if base <= job.master_port < base + HCCL_PORTS:
        base += HCCL_PORTS
    return Variable(
        name="HCCL_IF_BASE_PORT",
        value=str(base),
        reason=f"first of {HCCL_PORTS} ports; 60000, its default, is one that Linux hands out to others",
        source=f"fcp's default for Ascend, clear of --master-port {job.master_port}",
    )


# Output of `fcp launch --explain`: each variable of the job, why it is set, and the source of its value.

_FULL_WIDTH: Final = 80  # columns needed for the full table
# fcp's own variables -> (reason, source).
_OWN = {
    PLAN_VARIABLE: ("the plan that all ranks follow", "--plan, or the folder"),
    METRICS_VARIABLE: ("where rank 0 writes its measurements", "the run directory"),
    RUN_DIR_VARIABLE: ("where everything of the run goes", "--run-dir, or a new one"),
    ONLINE_VARIABLE: ("the planning settings of your script's stream", "--online"),
    MODEL_VARIABLE: ("the model, for your script", "--model"),
    OTHER_BATCHES_VARIABLE: ("your script may train on other batches than its own", "--accept-other-batches"),
}


def explained(job: Job) -> tuple[Variable, ...]:
    """Return all variables of the job: fcp's own, then those of the device kind."""
    environment = job.job_environment()
    own = [
        Variable(name=name, value=environment[name], reason=reason, source=source)
        for name, (reason, source) in _OWN.items()
        if name in environment
    ]
    return (*own, *job.variables)


def explanation_document(job: Job) -> dict[str, Any]:
    """Return the variables as JSON values, for `--json`."""
    found = [asdict(variable) for variable in explained(job)]
    return {"stack": job.stack, "variables": [{"set_by_fcp": not one.pop("is_given"), **one} for one in found]}


def explanation_table(job: Job, width: int) -> Table:
    """Return a table of a job's variables: name and value, reason, and source.

    Args:
        job: job to explain.
        width: terminal width in columns; below 80, sources are omitted.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column("variable", width=31, overflow="fold")
    table.add_column("why", width=22 if width >= _FULL_WIDTH else None)
    if width >= _FULL_WIDTH:
        table.add_column("value from", width=23)
    for variable in explained(job):
        value = variable.value or "(found on the node)"
        cells = (f"{variable.name}\n{escape(value)}", escape(variable.reason), escape(variable.source))
        table.add_row(*cells[: len(table.columns)])
    return table
