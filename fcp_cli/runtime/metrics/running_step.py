"""A running step of one rank: clock marks and loss share, until the device has passed them."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fcp_cli.runtime.metrics.message import RankMeasurement
from fcp_cli.runtime.metrics.timing import Clock


@dataclass(slots=True, eq=False, kw_only=True)
class RunningStep:
    """One running step of this rank.

    Attributes:
        step: optimizer step.
        begin, end: marks of its start, and of its end after the last optimizer step; `end` is None before.
        marks: (order, begin, end) of each micro-batch.
        predicted_seconds: planned makespan of the step.
        loss_sum, denominator: sum of the rank's token losses and its share of the loss denominator, in host memory or
            being copied there; None if the loop has no loss.
        is_whole: whether all its micro-batches have run.
        facts: values from the loop: `loss`, `grad_norm`, `learning_rate`, `bad_rows`.
    """

    step: int
    predicted_seconds: float
    begin: Any
    end: Any = None
    marks: list[tuple[int, Any, Any]] = field(default_factory=list)
    loss_sum: Tensor | None = None
    denominator: Tensor | None = None
    is_whole: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def note_loss(self, sums: list[Tensor], denominator: int | Tensor) -> None:
        """Record the micro-batches' losses (0-d) and the rank's share of the denominator without waiting for them."""
        if sums:
            total = (torch.stack(sums) if len(sums) > 1 else sums[0]).detach().double().sum()
            self.loss_sum = _on_host(total)
            self.denominator = _on_host(torch.as_tensor(denominator, dtype=torch.float64))

    def measured(self, clock: Clock, device: torch.device) -> RankMeasurement:
        """Return the measurements; waits for the device to pass the end."""
        start = self.marks[0][1] if self.marks else self.begin
        seconds = clock.seconds(self.begin, self.end)  # waits for the device, so the copies are complete, too
        knows_loss = self.loss_sum is not None and self.denominator is not None
        return RankMeasurement(
            step=self.step,
            seconds=seconds,
            loss_sum=float(self.loss_sum) if self.loss_sum is not None else 0.0,
            denominator=float(self.denominator) if knows_loss and self.denominator is not None else 0.0,
            peak_bytes=peak_memory_bytes(device),
            timings=[
                (order, clock.seconds(start, begin), clock.seconds(begin, end)) for order, begin, end in self.marks
            ],
        )


def _on_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    copy = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
    return copy.copy_(value, non_blocking=True)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak bytes allocated on this rank's device; on a CPU, the peak resident set size."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most: int = torch.get_device_module(device).max_memory_allocated(device)
    return most
