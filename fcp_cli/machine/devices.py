"""Devices of this machine on which ranks run."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.extras import pip_install
from fcp_cli.machine.host import host_memory_bytes, usable_cores
from fcp_cli.words import first_line

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
