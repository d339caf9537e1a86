"""This host: cores, memory, processor, accelerators, and the facts of `fcp env`. Does not import torch."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fcp_cli import __version__
from fcp_cli.errors import FcpError, RunError
from fcp_cli.util import network
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.words import first_line


def usable_cores() -> int:
    """Return the number of cores that this process may use, for example under `taskset` or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Return the physical memory of this host in bytes; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


# Detection of this machine's accelerators without torch, for the default cluster of `fcp plan`.

_SMI_SECONDS = 30.0  # nvidia-smi may wake the driver: about ten seconds with eight GPUs
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """Accelerators of one kind on this machine.

    Attributes:
        kind: `cuda` or `npu`.
        name: device name from the driver, or "" if unknown.
        count: number of devices that this process may use.
        memory_bytes: memory of the smallest device, or 0 if unknown.
    """

    kind: Literal["cuda", "npu"]
    name: str
    count: int
    memory_bytes: int = 0

    def describe(self) -> str:
        memory = f", {self.memory_bytes / 1e9:.0f} GB each" if self.memory_bytes else ""
        return f"{self.count} x {self.name or self.kind}{memory}"


def find_accelerators(root: Path = Path("/")) -> Accelerators | None:
    """Detect accelerators; return None if there are none or their drivers do not respond.

    Args:
        root: parent folder of `proc` and `dev`, for tests.
    """
    return _gpus(root) or _npus(root)


def _gpus(root: Path) -> Accelerators | None:
    """Query nvidia-smi, else read the kernel module's files, which do not state memory."""
    lines = _answer("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    found = [match for line in lines if (match := re.fullmatch(r"(.+), *(\d+)", line.strip()))]
    names = [match[1] for match in found]
    if not found:
        reports = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
        texts = [report.read_text(encoding="utf-8", errors="replace") for report in reports]
        names = [match[1].strip() for text in texts if (match := re.search(r"^Model:(.+)$", text, re.MULTILINE))]
    count = _usable("cuda", len(names))
    if not count:
        return None
    memory = min((int(match[2]) for match in found), default=0) * _MIB
    return Accelerators(kind="cuda", name=names[0], count=count, memory_bytes=memory)


def _npus(root: Path) -> Accelerators | None:
    """Count NPU device files, and take the name from npu-smi's table."""
    count = _usable("npu", len(list((root / "dev").glob("davinci[0-9]*"))))
    if not count:
        return None
    # | 0     910B3               | OK            | ...
    rows = (re.match(r"\|\s*\d+\s+(\d{3}\w*|Ascend\w*)\s*\|", line) for line in _answer("npu-smi", "info"))
    chip = next((row[1] for row in rows if row), "")
    return Accelerators(kind="npu", name=f"Ascend {chip.removeprefix('Ascend')}".strip(), count=count)


def _usable(kind: str, count: int) -> int:
    """Return the number of devices visible under a variable such as CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get(VISIBLE_DEVICES[kind])
    return count if visible is None else min(count, len([word for word in visible.split(",") if word.strip()]))


def _answer(*command: str) -> list[str]:
    """Return a program's output lines, or [] if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


# Devices of this machine on which ranks run.

# With more processes per core, CPU ranks mostly wait for each other.
_RANKS_PER_CORE = 2
_LEAST_CPU_RANKS = 8


# Device files of NVIDIA (also under WSL), AMD and Huawei. Without any of them, torch finds no accelerator.
_DRIVER_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "davinci*")


VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Variables that restrict the visible devices, by kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDevices:
    """Devices of one kind.

    Attributes:
        device: `cpu`, `cuda` or `npu`; `unknown` without torch.
        num_devices: number of accelerators; 0 on a CPU.
        num_cores: number of cores that this process may use.
        memory_bytes: host memory; 0 if unknown.
        device_memory_bytes: memory of the smallest accelerator; 0 on a CPU or if unknown.
        visible: setting that restricts devices, for example `CUDA_VISIBLE_DEVICES=0`; or "".
    """

    device: str
    num_devices: int
    num_cores: int
    memory_bytes: int = 0
    device_memory_bytes: int = 0
    visible: str = ""

    @property
    def most_ranks(self) -> int:
        """Maximum number of ranks: one per accelerator, or a sensible number on a CPU."""
        if self.device != "cpu":
            return self.num_devices
        return max(_LEAST_CPU_RANKS, _RANKS_PER_CORE * self.num_cores)

    def describe(self) -> str:
        if self.device == "cpu":
            return f"no accelerator, {self.num_cores} CPU cores (gloo)"
        return f"{self.num_devices} {self.device} devices{f' with {self.visible}' if self.visible else ''}"

    def threads_per_rank(self, ranks: int) -> int:
        return max(1, self.num_cores // ranks)


def require_torch() -> None:
    """Raise RunError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise RunError(f"torch is not installed here, and training needs it; run: {pip_install('hf')}")


def has_driver_files(folder: Path = Path("/dev")) -> bool:
    """Return whether an accelerator driver is present, so that torch must be queried."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _DRIVER_FILES)


def find_machine(device: str = "auto") -> LocalDevices:
    """Detect this machine's devices of kind `device`, importing torch only if there are driver files.

    Raises:
        RunError: torch is missing or broken, or there is no such device.
    """
    require_torch()
    counts = _accelerators() if has_driver_files() else {}
    found = next((kind for kind, count in counts.items() if count), "cpu") if device == "auto" else device
    if found != "cpu" and not counts.get(found):
        raise RunError(f"there is no {found} device here; 'fcp env' lists the devices")
    name = VISIBLE_DEVICES.get(found, "")
    return LocalDevices(
        device=found,
        num_devices=counts.get(found, 0),
        num_cores=usable_cores(),
        memory_bytes=host_memory_bytes(),
        device_memory_bytes=_device_memory_bytes(found, counts.get(found, 0)),
        visible=f"{name}={os.environ[name]}" if name in os.environ else "",
    )


def find_machine_without_torch(device: str = "auto") -> LocalDevices:
    """Detect this machine's devices for MindSpore: NPUs are counted by their device files."""
    npus = len(list(Path("/dev").glob("davinci[0-9]*")))
    found = ("npu" if npus else "cpu") if device == "auto" else device
    if found not in ("cpu", "npu") or (found == "npu" and not npus):
        raise RunError(f"there is no {found} device here that MindSpore could use; 'fcp env' lists the devices")
    return LocalDevices(
        device=found,
        num_devices=npus if found == "npu" else 0,
        num_cores=usable_cores(),
        memory_bytes=host_memory_bytes(),
    )


UNKNOWN_MACHINE = LocalDevices(device="unknown", num_devices=0, num_cores=1)
"""A machine on which nothing will run: a head node without torch can still print commands."""


def _accelerators() -> dict[str, int]:
    """Return the number of devices per kind; torch has an `npu` module only if torch_npu is installed."""
    torch = load_torch()
    return {
        kind: getattr(torch, kind).device_count()
        for kind in ("cuda", "npu")
        if hasattr(torch, kind) and getattr(torch, kind).is_available()
    }


def _device_memory_bytes(kind: str, count: int) -> int:
    """Return the memory of the smallest device of a kind, or 0 if there is none."""
    module = getattr(load_torch(), kind, None) if count else None
    if module is None:
        return 0
    return min(int(module.get_device_properties(index).total_memory) for index in range(count))


def load_torch() -> Any:
    """Import torch and return it; raise RunError if it does not import."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        # Without its drivers, torch_npu breaks `import torch` itself.
        raise RunError(
            f"torch does not import here ({first_line(error)}); if torch_npu is to blame, source CANN's "
            "set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to train on the CPU"
        ) from error
    return torch


# Facts about this machine: versions, devices, libraries, network, settings; for `fcp env` and launch checks.
#
# Collecting never raises, since it is needed when something is broken.

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
_PROGRAMS = ("python", "python3", "torchrun", "msrun", "sbatch", "srun")
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
