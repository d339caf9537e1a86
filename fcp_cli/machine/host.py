"""Cores, memory and processor name of this host. Does not import torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
