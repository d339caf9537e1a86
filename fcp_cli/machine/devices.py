"""The devices of this machine that ranks run on."""

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

# Beyond this many processes per core, ranks on a CPU mostly wait for each other.
_RANKS_PER_CORE = 2
_LEAST_CPU_RANKS = 8


# Files of drivers: NVIDIA's (also under WSL), AMD's, Huawei's. torch finds no accelerator where all are missing.
_DRIVER_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd", "davinci*")


VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""The variables that hide devices from a process, by kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDevices:
    """Devices of one kind.

    Attributes:
        device: `cpu`, `cuda` or `npu`; `unknown` where torch is missing.
        num_devices: accelerators, or 0 on a CPU.
        num_cores: cores that this process may use.
        memory_bytes: the memory bytes of the host; 0 if it is not known.
        device_memory_bytes: the device memory bytes of the smallest accelerator; 0 on a CPU, or if it is not known.
        visible: the setting that hides other devices, like `CUDA_VISIBLE_DEVICES=0`; "" if there is none.
    """

    device: str
    num_devices: int
    num_cores: int
    memory_bytes: int = 0
    device_memory_bytes: int = 0
    visible: str = ""

    @property
    def most_ranks(self) -> int:
        """Ranks that can run here at once: one per accelerator, or a sensible number on a CPU."""
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
    """Check that torch is installed."""
    if importlib.util.find_spec("torch") is None:
        raise RunError(f"torch is not installed here, and training needs it; run: {pip_install('hf')}")


def has_driver_files(folder: Path = Path("/dev")) -> bool:
    """Return whether this machine has an accelerator's driver, which torch then has to be asked about."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _DRIVER_FILES)


def find_machine(device: str = "auto") -> LocalDevices:
    """Look at this machine; `device` narrows the choice. Without accelerators torch is not imported."""
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
    """Look at this machine for programs of MindSpore: NPUs are counted by their files in /dev."""
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
"""Where nothing will run: a head node without torch can still print commands."""


def _accelerators() -> dict[str, int]:
    """Return devices per kind; torch registers an `npu` module only where torch_npu is installed."""
    torch = load_torch()
    return {
        kind: getattr(torch, kind).device_count()
        for kind in ("cuda", "npu")
        if hasattr(torch, kind) and getattr(torch, kind).is_available()
    }


def _device_memory_bytes(kind: str, count: int) -> int:
    """Return the memory of the smallest device of a kind; 0 if there is none."""
    module = getattr(load_torch(), kind, None) if count else None
    if module is None:
        return 0
    return min(int(module.get_device_properties(index).total_memory) for index in range(count))


def load_torch() -> Any:
    """Import torch and return it."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        # torch_npu without its drivers breaks `import torch` itself.
        raise RunError(
            f"torch does not import here ({first_line(error)}); if torch_npu is to blame, source CANN's "
            "set_env.sh, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to train on the CPU"
        ) from error
    return torch
