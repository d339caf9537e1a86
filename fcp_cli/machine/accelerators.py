"""Detection of this machine's accelerators without torch, for the default cluster of `fcp plan`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fcp_cli.machine.devices import VISIBLE_DEVICES

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
