"""Time without the load of others, peak memory, memory and name of a device, for the worker that measures."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from fcp_cli.machine.host import cpu_name, host_memory_bytes
from fcp_cli.runtime.timing import Clock, clock_for


class Stopwatch:
    """Measures seconds of work on a device, without the time that this thread waited for a core to run on.

    On an accelerator these are events on its stream. On a CPU, Linux counts how long the thread stood in the run
    queue (schedstat); elsewhere the wall clock has to do. A result is never below the time that the thread
    computed: clocks of different cores make the queue's time exceed the truth now and then. Where the ranks themselves
    share cores (`shares_cores`), waiting for a core is part of what a job sees, and the wall clock is what counts.
    """

    def __init__(self, device: torch.device, *, shares_cores: bool = False) -> None:
        self._clock: Clock = clock_for(device)
        self._leaves_waits_out = device.type == "cpu" and not shares_cores

    def measure(self, work: Callable[[], None]) -> float:
        """Run `work` and return its seconds."""
        waited, computed = run_queue_seconds(), time.thread_time()
        begin = self._clock.mark()
        work()
        seconds = self._clock.seconds(begin, self._clock.mark())
        if not self._leaves_waits_out:
            return seconds
        return max(seconds - (run_queue_seconds() - waited), time.thread_time() - computed)


def run_queue_seconds() -> float:
    """Return how long this thread has stood in the run queue since it began; 0 where the system does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def device_memory_bytes(device: torch.device, *, ranks_on_host: int) -> float:
    """Return the bytes of memory of the device; a CPU's is shared by the ranks on this host."""
    if device.type == "cpu":
        return host_memory_bytes() / ranks_on_host
    return float(torch.get_device_module(device).get_device_properties(device).total_memory)


def clocks(device: torch.device) -> str | None:
    """Return the clocks that an NVIDIA device runs at now and may reach, as its driver prints them; None elsewhere."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError):
        query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit"
        command = ["nvidia-smi", query, "--format=csv,noheader", f"--id={device.index or 0}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return f"SM now, SM most, memory, power limit: {done.stdout.strip()}"
    return None


class PeakMemory:
    """Peak bytes of this process's device since `reset`.

    On a CPU it is the peak resident size, which Linux lets a process reset. The C library keeps freed memory, so a
    peak means something only when it exceeds all former ones: read growing sizes, and read differences.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset(self) -> None:
        if self._device.type == "cpu":
            with suppress(OSError):
                # 5 sets VmHWM back to the present resident size; see proc(5).
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        else:
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> float | None:
        """Return the peak since `reset`; None where the system does not count it."""
        if self._device.type != "cpu":
            return float(torch.get_device_module(self._device).max_memory_allocated(self._device))
        with suppress(OSError):
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return float(line.split()[1]) * 1024
        return None


def ranks_on_this_host() -> int:
    """Return how many ranks torchrun started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
