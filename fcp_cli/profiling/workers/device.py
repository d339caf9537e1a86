"""Timing without the effect of other load, peak memory, memory and name of a device, for the measuring worker."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch

from fcp_cli.machine.host import cpu_name, host_memory_bytes
from fcp_cli.runtime.metrics.timing import Clock, clock_for


class Stopwatch:
    """Measures the time of work on a device, excluding the time that this thread waited for a core.

    Accelerators are timed with events on the stream. On a CPU, time in Linux's run queue (schedstat) is subtracted, if
    available. A result is never below the thread's CPU time, since skew between cores may inflate the queue time. If
    ranks share cores (`shares_cores`), waiting for a core is part of a job's time, and wall-clock time is used.
    """

    def __init__(self, device: torch.device, *, shares_cores: bool = False) -> None:
        self._clock: Clock = clock_for(device)
        self._leaves_waits_out = device.type == "cpu" and not shares_cores
        self._runs_ahead = device.type != "cpu"

    def measure(self, work: Callable[[], None]) -> float:
        """Run `work` and return its seconds."""
        waited, computed = run_queue_seconds(), time.thread_time()
        begin = self._clock.mark()
        work()
        seconds = self._clock.seconds(begin, self._clock.mark())
        if not self._leaves_waits_out:
            return seconds
        return max(seconds - (run_queue_seconds() - waited), time.thread_time() - computed)

    def measure_each(
        self, work: Callable[[], None], repeats: int, *, pause: Callable[[], None] | None = None
    ) -> list[float]:
        """Run `work` repeatedly and return the seconds of each run.

        On an accelerator, runs are back to back as in a job, without host synchronization. An uncounted first run
        absorbs idle clocks and late ranks.

        Args:
            work: work to time.
            repeats: number of runs.
            pause: called before each run on a CPU, so that ranks start together.
        """
        if not self._runs_ahead:
            found = []
            for _ in range(repeats):
                if pause is not None:
                    pause()
                found.append(self.measure(work))
            return found
        work()
        marks = [self._clock.mark()]
        for _ in range(repeats):
            work()
            marks.append(self._clock.mark())
        return [self._clock.seconds(begin, end) for begin, end in pairwise(marks)]


def run_queue_seconds() -> float:
    """Return this thread's total time in the run queue; 0 if the system does not record it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return cpu_name()
    return str(torch.get_device_module(device).get_device_name(device))


def device_memory_bytes(device: torch.device, *, ranks_on_host: int) -> float:
    """Return the device memory; a host's memory is divided by its ranks."""
    if device.type == "cpu":
        return host_memory_bytes() / ranks_on_host
    return float(torch.get_device_module(device).get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> float:
    """Return free device memory; for a CPU all host memory, since free memory is unknown."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).mem_get_info(device)[0])
    return float(host_memory_bytes())


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def sm_clock_mhz(device: torch.device) -> float | None:
    """Return the current SM clock of an NVIDIA device in MHz, or None."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(_nvidia_smi("clocks.sm", device).split()[0])
    return None


def clocks(device: torch.device) -> str | None:
    """Return the current and maximum clocks of an NVIDIA device as text, or None."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError):
        figures = _nvidia_smi("clocks.sm,clocks.max.sm,clocks.mem,power.limit", device)
        return f"SM now, SM most, memory, power limit: {figures}"
    return None


def _nvidia_smi(figures: str, device: torch.device) -> str:
    # By UUID: CUDA_VISIBLE_DEVICES renumbers devices.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    command = ["nvidia-smi", f"--query-gpu={figures}", "--format=csv,noheader", f"--id={name}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def reset_peak(device: torch.device) -> None:
    """Restart the peak of `peak_bytes`.

    On a CPU this is the peak resident size, which Linux can reset. Since the C library keeps freed memory, only a peak
    above all earlier ones is meaningful: measure growing sizes, and use differences.
    """
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # 5 resets VmHWM to the current resident size; see proc(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> float | None:
    """Return the peak memory of this process since `reset_peak`, or None if not recorded."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None


def ranks_on_this_host() -> int:
    """Return the number of ranks that torchrun started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
