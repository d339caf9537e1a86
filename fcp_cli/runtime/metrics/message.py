"""One rank's measurement of one step, encoded for rank 0 as a float64 vector, which holds counts exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics.metrics import Timing, step_record

_HEADER = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """Measurement of a step by one rank.

    Attributes:
        step: optimizer step.
        seconds: time from the end of the previous step to the end of this one.
        loss_sum: sum of the rank's token losses.
        denominator: this rank's share of the loss denominator; 0 on all ranks if there is no loss.
        peak_bytes: peak memory of the rank so far.
        timings: timings of its micro-batches, in order.
    """

    step: int
    seconds: float
    loss_sum: float
    denominator: float
    peak_bytes: int
    timings: Sequence[Timing]

    def encode(self) -> bytes:
        header = [self.step, self.seconds, self.loss_sum, self.denominator, self.peak_bytes]
        return np.array([*header, *(value for timing in self.timings for value in timing)], dtype="<f8").tobytes()

    @classmethod
    def decode(cls, message: bytes) -> RankMeasurement:
        """Return the measurement encoded by `encode`."""
        values = np.frombuffer(message, dtype="<f8")
        step, seconds, loss_sum, denominator, peak_bytes = values[:_HEADER].tolist()
        return cls(
            step=int(step),
            seconds=seconds,
            loss_sum=loss_sum,
            denominator=denominator,
            peak_bytes=int(peak_bytes),
            timings=[(int(order), start, took) for order, start, took in values[_HEADER:].reshape(-1, 3).tolist()],
        )


def measured_record(
    plan: StepPlan, ranks: Sequence[RankMeasurement], *, loss: float, is_first: bool, **facts: Any
) -> dict[str, Any]:
    """Return the record of a step that all ranks have finished.

    Args:
        plan: the planned step.
        ranks: measurements of all ranks, in rank order.
        loss: loss of the step.
        is_first: whether it is the loop's first step, whose time includes warm-up.
        facts: further fields of the record.
    """
    return step_record(
        plan,
        [rank.timings for rank in ranks],
        seconds=ranks[0].seconds,
        loss=loss,
        warm_up=is_first,
        peak_bytes=[rank.peak_bytes for rank in ranks],
        **facts,
    )


def mean_loss(ranks: Mapping[int, RankMeasurement]) -> float:
    """Return the step's loss over all ranks; NaN if there is none."""
    denominator = sum(rank.denominator for rank in ranks.values())
    return sum(rank.loss_sum for rank in ranks.values()) / denominator if denominator else math.nan
