"""Reports versions, devices, topology, the selected kernel, and variables that back ends read."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from contextlib import suppress

import torch

from fcp_cli.machine.host import usable_cores
from fcp_cli.profiling.workers.device import clocks, device_memory_bytes, device_name
from fcp_cli.profiling.workers.worker import job_variables
from fcp_cli.runtime.kernels import select_kernel
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.findings import Finding

_PACKAGES = (
    "torch",
    "torch-npu",
    "transformers",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "liger-kernel",
    "triton",
)


def check(bench: Bench) -> Finding:
    """Describe the machine and the software of the ranks."""
    device = bench.device
    kernels = [name for name in bench.kernels if name is not None]
    kernel = "/".join(kernels) or type(select_kernel(device.type, bench.dtype)).__name__
    versions = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    figures = {
        "device": device.type,
        "device_name": device_name(device),
        "device_memory_bytes": device_memory_bytes(device, ranks_on_host=bench.ranks_per_node),
        "ranks": bench.world.size,
        "ranks_per_node": bench.ranks_per_node,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "versions": versions,
        "backend_version": _backend_version(device),
        "kernel": kernel,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "clocks": clocks(device),
        "topology": _topology(device),
        "variables": job_variables(),
    }
    back_end = f", {figures['backend_version']}" if figures["backend_version"] else ""
    return Finding(
        name="machine",
        passed=None,
        lines=(
            f"{bench.world.size} ranks, {bench.ranks_per_node} a node, of {figures['device_name']}, "
            f"{device_memory_bytes(device, ranks_on_host=bench.ranks_per_node) / 1e9:.1f} GB each{back_end}",
            f"kernel {kernel} in {figures['dtype']}; " + ", ".join(f"{name} {v}" for name, v in versions.items()),
            " ".join(f"{name}={value}" for name, value in job_variables().items()) or "no variables set",
        ),
        figures=figures,
    )


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _backend_version(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"CUDA {torch.version.cuda}, NCCL {version}"


def _topology(device: torch.device) -> str | None:
    """Return the device topology of this node, as the driver prints it."""
    command = {"cuda": ["nvidia-smi", "topo", "-m"], "npu": ["npu-smi", "info", "-t", "topo"]}.get(device.type)
    if command is not None:
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    return None
