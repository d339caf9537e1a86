"""Measure when each micro-batch ran, without blocking the host."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchTiming:
    """Timing of one micro-batch of one rank, relative to the rank's start of the step.

    Under DDP and FSDP2 the last micro-batch of a step includes the gradient reduction.
    """

    order: int
    start_seconds: float
    seconds: float


class Clock:
    """Clock for the CPU, whose work is done when a call returns."""

    def mark(self) -> Any:
        """Return a point in time on the device; costs the host microseconds."""
        return time.perf_counter()

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return the seconds between two marks; waits until the device has passed both."""
        return float(later - earlier)

    def has_passed(self, mark: Any) -> bool:
        """Return whether the device has passed a mark; never wait. Thread-safe."""
        return True


class DeviceClock(Clock):
    """Clock for an accelerator: events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)

    def mark(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: Any, later: Any) -> float:
        later.synchronize()
        return float(earlier.elapsed_time(later)) / 1e3

    def has_passed(self, mark: Any) -> bool:
        return bool(mark.query())


def clock_for(device: torch.device) -> Clock:
    return Clock() if device.type == "cpu" else DeviceClock(device)
