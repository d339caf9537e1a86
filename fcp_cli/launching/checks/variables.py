"""Checks for environment variables that slow down or break a job."""

from __future__ import annotations

from collections.abc import Iterator

from fcp_cli.launching.checks.finding import LaunchFinding, error, number, warning
from fcp_cli.launching.job.environment import wants_one_queue
from fcp_cli.launching.job.job import Job
from fcp_cli.machine.devices import VISIBLE_DEVICES
from fcp_cli.machine.facts import Facts

_LEAST_CONNECT_SECONDS = 300


def hccl_timeouts(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
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


def device_connections(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check CUDA_DEVICE_MAX_CONNECTIONS, which Ascend also uses."""
    value = facts.variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if job.stack not in ("cuda", "npu") or value is None:
        return
    is_one_wanted = wants_one_queue(job) is not None
    if value == "1" and not is_one_wanted:
        yield warning(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts a device's streams into one line, where rings, reductions and gathers "
            "wait for each other; only Megatron's tensor parallelism needs it: unset it"
        )
    if value != "1" and is_one_wanted:
        yield warning(f"CUDA_DEVICE_MAX_CONNECTIONS={value} breaks the order that Megatron overlaps in; export 1")


def blocking_launches(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check for blocking kernel launches, a slow debugging mode."""
    name = {"cuda": "CUDA_LAUNCH_BLOCKING", "npu": "ASCEND_LAUNCH_BLOCKING"}.get(job.stack, "")
    if facts.variables.get(name) == "1":
        yield warning(f"{name}=1 makes every kernel wait for the one before, so no hop is hidden; unset it")


def visible_devices(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
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


def thread_count(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that CPU ranks together have at most twice as many threads as cores."""
    threads = number(facts, "OMP_NUM_THREADS")
    if job.stack != "cpu" or threads is None or facts.machine is None:
        return
    total = threads * job.processes_per_node
    if total > 2 * facts.machine.num_cores and threads > 1:
        yield warning(
            f"OMP_NUM_THREADS={threads:.0f} x {job.processes_per_node} ranks = {total:.0f} threads on "
            f"{facts.machine.num_cores} cores; unset it to let fcp share the cores"
        )


def backend_autoload(job: Job, facts: Facts) -> Iterator[LaunchFinding]:
    """Check that torch autoloads torch_npu, which Ascend devices require."""
    if job.stack == "npu" and facts.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield warning(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu; unset it, or import torch_npu in the "
            "script"
        )
