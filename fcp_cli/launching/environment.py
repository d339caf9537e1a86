"""What `fcp env` tells: versions, devices and communication libraries, for an issue or a colleague."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from fcp_cli import __version__
from fcp_cli.errors import FcpError
from fcp_cli.launching.machine import find_machine, load_torch

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
# Settings that change how a job starts or communicates; values of other variables are nobody's business.
_VARIABLES = (
    "FCP_",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "ASCEND_HOME_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "NCCL_",
    "HCCL_",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "PYTORCH_",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "SLURM_JOB_ID",
)
_NOT_INSTALLED = "not installed"


def environment_report() -> dict[str, Any]:
    """Versions, devices, libraries and settings; never raises, since it is asked for when something is broken."""
    return {
        "fcp": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "communication": _communication(),
        "cann": _cann_version(),
        "launchers": {name: shutil.which(name) for name in ("torchrun", "msrun", "sbatch", "srun")},
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    """What ranks would run on, or why there is nothing."""
    try:
        machine = find_machine()
    except FcpError as error:
        return {"device": None, "error": str(error)}
    names = []
    if machine.device != "cpu":
        module = getattr(load_torch(), machine.device)
        names = [module.get_device_name(index) for index in range(machine.num_devices)]
    return {
        "device": machine.device,
        "names": names,
        "cuda": load_torch().version.cuda,
        "usable_cores": machine.num_cores,
        "most_ranks": machine.most_ranks,
        "memory_bytes": machine.memory_bytes,
    }


def _communication() -> dict[str, str | None]:
    """Back ends of torch.distributed, with versions where they tell one."""
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
    """Of the CANN toolkit whose set_env.sh was sourced, else of the one at its usual place."""
    home = os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
    for path in sorted(Path(home).glob("**/ascend_toolkit_install.info"))[:1]:
        match = re.search(r"^version=(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        return match[1].strip() if match else f"unknown version in {home}"
    return None


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report as `- name: value` lines, ready to be pasted."""
    lines = [f"- {name}: {report[name]}" for name in ("fcp", "python", "system", "cpu_cores")]
    lines += [f"- {name}: {version or _NOT_INSTALLED}" for name, version in report["packages"].items()]
    lines += [f"- devices: {_device_text(report['devices'])}"]
    lines += [f"- {name}: {state or 'not available'}" for name, state in report["communication"].items()]
    lines += [f"- CANN: {report['cann'] or 'not found'}"]
    lines += [f"- {name}: {path or 'not on PATH'}" for name, path in report["launchers"].items()]
    lines += [f"- {name}={value}" for name, value in report["variables"].items()]
    return lines


def _device_text(devices: dict[str, Any]) -> str:
    if devices["device"] is None:
        return str(devices["error"])
    names = ", ".join(sorted(set(devices["names"]))) or f"{devices['usable_cores']} cores"
    count = len(devices["names"])
    toolkit = f" (CUDA {devices['cuda']})" if devices["cuda"] else ""
    return f"{count} x {names}{toolkit}" if count else f"{devices['device']}, {names}"
