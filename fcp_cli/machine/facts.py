"""Facts about this machine: versions, devices, libraries, network, settings; for `fcp env` and launch checks.

Collecting never raises, since it is needed when something is broken.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fcp_cli import __version__
from fcp_cli.errors import FcpError
from fcp_cli.machine import network
from fcp_cli.machine.devices import LocalDevices, find_machine, load_torch

_PACKAGES = (
    "numpy",
    "pyarrow",
    "numba",
    "scipy",
    "torch",
    "torch-npu",
    "transformers",
    "tokenizers",
    "tensorboard",
    "mindspore",
    "mindspeed",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
)
_PROGRAMS = ("python", "python3", "torchrun", "msrun", "sbatch", "srun", "pdsh")
# Settings that affect how a job starts or communicates. Other variables may hold secrets and are skipped.
_VARIABLES = (
    "FCP_",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "ASCEND_",
    "ACLNN_CACHE_LIMIT",
    "TASK_QUEUE_ENABLE",
    "CPU_AFFINITY_CONF",
    "NCCL_",
    "HCCL_",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "PYTORCH_",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "SLURM_NODEID",
)
_NOT_INSTALLED = "not installed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about this machine; the last five are its view of a job's nodes, filled in by `launching.checks`.

    Attributes:
        packages, programs: version or path by name; None if missing.
        machine: devices, or None if torch is missing or broken, with the reason in `machine_error`.
        device_names, device_memory_bytes: name of each accelerator, and memory of the smallest.
        cann_home: path exported by CANN's set_env.sh, or None.
        has_hccl: whether libhccl.so is found.
        open_files: limit on open files and sockets of a process; 0 if unknown.
        variables: environment variables that affect how a job starts or communicates.
        master_addresses, master_is_here: for multi-node jobs, addresses of node 0, and whether it is this machine.
        way_problem: reason why this node cannot reach node 0, or "".
        port_problem: reason why node 0 cannot listen on the rendezvous port, or "".
        hosts_here: indices of the job's hosts that are this machine.
    """

    fcp: str = __version__
    python: str = sys.executable
    python_version: str = ""
    system: str = ""
    host: str = ""
    cpu_cores: int = 1
    packages: Mapping[str, str | None] = field(default_factory=dict)
    programs: Mapping[str, str | None] = field(default_factory=dict)
    machine: LocalDevices | None = None
    machine_error: str = ""
    device_names: tuple[str, ...] = ()
    device_memory_bytes: int = 0
    cuda_version: str | None = None
    communication: Mapping[str, str | None] = field(default_factory=dict)
    cann_home: str | None = None
    cann_version: str | None = None
    has_hccl: bool = False
    interfaces: tuple[str, ...] = ()
    open_files: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    master_addresses: tuple[str, ...] = ()
    master_is_here: bool = False
    way_problem: str = ""
    port_problem: str = ""
    hosts_here: tuple[int, ...] = ()


def collect_facts(
    *,
    machine: LocalDevices | None = None,
    added: Mapping[str, str] = MappingProxyType({}),
    path: str | None = None,
    asks_torch: bool = True,
) -> Facts:
    """Collect the facts of this machine.

    Args:
        machine: devices of the machine, if already detected.
        added: environment variables that the job adds.
        path: PATH of the job; None: unchanged.
        asks_torch: whether to import torch, which takes seconds, for devices and back ends.
    """
    error = ""
    if machine is None:
        try:
            machine = find_machine()
        except FcpError as failure:
            error = str(failure)
    return Facts(
        python_version=platform.python_version(),
        system=platform.platform(),
        host=socket.gethostname(),
        cpu_cores=os.cpu_count() or 1,
        packages={name: _version(name) for name in _PACKAGES},
        programs={name: shutil.which(name, path=path) for name in _PROGRAMS},
        machine=machine,
        machine_error=error,
        **(_devices(machine) if asks_torch else {}),
        communication=_communication() if asks_torch else {},
        cann_home=os.environ.get("ASCEND_HOME_PATH"),
        cann_version=_cann_version(),
        has_hccl=_has_library("hccl"),
        interfaces=network.interfaces(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        variables={
            name: value for name, value in sorted({**os.environ, **added}.items()) if name.startswith(_VARIABLES)
        },
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(machine: LocalDevices | None) -> dict[str, Any]:
    """Return the fields of `Facts` about devices that torch knows."""
    if machine is None:
        return {}
    try:
        torch = load_torch()
    except FcpError:  # head nodes without torch only print commands
        return {}
    found: dict[str, Any] = {"cuda_version": torch.version.cuda}
    if machine.num_devices:
        module = getattr(torch, machine.device)
        found["device_names"] = tuple(module.get_device_name(index) for index in range(machine.num_devices))
        found["device_memory_bytes"] = machine.device_memory_bytes
    return found


def _communication() -> dict[str, str | None]:
    """Return the back ends of torch.distributed with their versions, if any."""
    try:
        torch = load_torch()
    except FcpError:
        return {}
    distributed = torch.distributed
    if not distributed.is_available():
        return {}
    found: dict[str, str | None] = {"gloo": "available" if distributed.is_gloo_available() else None, "nccl": None}
    if distributed.is_nccl_available() and torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["hccl"] = "available" if getattr(distributed, "is_hccl_available", lambda: False)() else None
    return found


def _cann_version() -> str | None:
    """Return the version of the sourced CANN toolkit, else of the one at the default path."""
    home = os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
    for path in sorted(Path(home).glob("**/ascend_toolkit_install.info"))[:1]:
        match = re.search(r"^version=(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return match[1].strip() if match else f"unknown version in {home}"
    return None


def _has_library(name: str) -> bool:
    """Return whether lib<name>.so is found on LD_LIBRARY_PATH (which set_env.sh extends) or by the loader."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    return any((Path(folder) / f"lib{name}.so").exists() for folder in folders) or bool(ctypes.util.find_library(name))


def facts_document(facts: Facts) -> dict[str, Any]:
    """Return JSON values, for `fcp env --json`."""
    machine = facts.machine
    devices: dict[str, Any] = {"device": None, "error": facts.machine_error}
    if machine is not None:
        devices = {
            "device": machine.device,
            "names": list(facts.device_names),
            "memory_bytes": facts.device_memory_bytes or None,
            "cuda": facts.cuda_version,
            "usable_cores": machine.num_cores,
            "most_ranks": machine.most_ranks,
            "host_memory_bytes": machine.memory_bytes,
        }
    return {
        "fcp": facts.fcp,
        "python": f"{facts.python_version} ({facts.python})",
        "system": facts.system,
        "cpu_cores": facts.cpu_cores,
        "packages": dict(facts.packages),
        "devices": devices,
        "communication": dict(facts.communication),
        "cann": facts.cann_version,
        "cann_sourced": facts.cann_home is not None,
        "hccl_library": facts.has_hccl,
        "programs": dict(facts.programs),
        "interfaces": list(facts.interfaces),
        "open_files": facts.open_files,
        "variables": dict(facts.variables),
    }


def facts_lines(facts: Facts) -> list[str]:
    """Format the facts as `- name: value` lines for pasting."""
    cann = f"{facts.cann_version or 'not found'}, set_env.sh {'' if facts.cann_home else 'not '}sourced"
    lines = [f"- fcp: {facts.fcp}", f"- python: {facts.python_version} ({facts.python})"]
    lines += [f"- system: {facts.system}", f"- cpu cores: {facts.cpu_cores}"]
    lines += [f"- {name}: {version or _NOT_INSTALLED}" for name, version in facts.packages.items()]
    lines += [f"- devices: {_device_text(facts)}"]
    lines += [f"- {name}: {state or 'not available'}" for name, state in facts.communication.items()]
    lines += [f"- CANN: {cann}, libhccl.so {'' if facts.has_hccl else 'not '}found"]
    lines += [f"- {name}: {path or 'not on PATH'}" for name, path in facts.programs.items()]
    lines += [f"- interfaces: {', '.join(facts.interfaces) or 'unknown'}", f"- open files: {facts.open_files}"]
    return [*lines, *(f"- {name}={value}" for name, value in facts.variables.items())]


def _device_text(facts: Facts) -> str:
    if facts.machine is None:
        return facts.machine_error
    names = ", ".join(sorted(set(facts.device_names))) or f"{facts.machine.num_cores} cores"
    toolkit = f" (CUDA {facts.cuda_version})" if facts.cuda_version else ""
    memory = f", {facts.device_memory_bytes / 1e9:.0f} GB each" if facts.device_memory_bytes else ""
    count = len(facts.device_names)
    return f"{count} x {names}{memory}{toolkit}" if count else f"{facts.machine.device}, {names}"
