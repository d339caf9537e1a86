"""Time without the load of others, peak memory, memory and name of a device, for the worker that measures."""

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
    """Measures seconds of work on a device, without the time that this thread waited for a core to run on.

    On an accelerator these are events on its stream. On a CPU, Linux counts how long the thread stood in the run
    queue (schedstat); elsewhere the wall clock is used. A result is never below the time that the thread
    computed: clocks of different cores make the queue's time exceed the truth now and then. If the ranks themselves
    share cores (`shares_cores`), waiting for a core is part of a job's time, and the wall clock counts.
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
        """Run `work` so many times and return the seconds of each.

        On an accelerator back to back, as a job runs: the host waits for none of them, and the first, which begins on
        an idle device at other clocks and while other ranks may still come, is run beforehand and does not count.

        Args:
            work: the work to time.
            repeats: how often.
            pause: the pause of a CPU's ranks between two of them, so that none starts late.
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
    """Return how long this thread has stood in the run queue since it began; 0 if the system does not count it."""
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


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device; of a CPU all of the host's, since free memory is unknown."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).mem_get_info(device)[0])
    return float(host_memory_bytes())


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def sm_clock_mhz(device: torch.device) -> float | None:
    """Return the clock that an NVIDIA device computes at now, in MHz; None elsewhere."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return float(_nvidia_smi("clocks.sm", device).split()[0])
    return None


def clocks(device: torch.device) -> str | None:
    """Return the clocks that an NVIDIA device runs at now and may reach, as its driver prints them; None elsewhere."""
    if device.type != "cuda":
        return None
    with suppress(OSError, subprocess.SubprocessError):
        figures = _nvidia_smi("clocks.sm,clocks.max.sm,clocks.mem,power.limit", device)
        return f"SM now, SM most, memory, power limit: {figures}"
    return None


def _nvidia_smi(figures: str, device: torch.device) -> str:
    # By its own name: CUDA_VISIBLE_DEVICES gives devices other numbers than the driver's.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = f"GPU-{uuid}" if uuid is not None else str(device.index or 0)
    command = ["nvidia-smi", f"--query-gpu={figures}", "--format=csv,noheader", f"--id={name}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` count from now on.

    On a CPU the peak is that of the resident size, which Linux lets a process reset. The C library keeps freed memory,
    so a peak means something only if it exceeds all former ones: read growing sizes, and read differences.
    """
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        # 5 sets VmHWM back to the present resident size; see proc(5).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(device: torch.device) -> float | None:
    """Return the peak bytes of this process on a device since `reset_peak`; None if the system does not count it."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated(device))
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    return None


def ranks_on_this_host() -> int:
    """Return how many ranks torchrun started on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
