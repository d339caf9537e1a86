"""One rank's measurement of one step as the bytes that rank 0 gets: a vector of float64, which holds counts exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics.metrics import StepMeasurement
from fcp_cli.runs.metrics.metrics_record import TimingRecord

Timing: TypeAlias = tuple[int, float, float]
"""Order in the step, seconds from the rank's start of the step to its start, and seconds of one micro-batch."""

_HEADER = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """Measurement of a step by one rank.

    Attributes:
        seconds: the time from the end of the step before to the end of this one.
        loss_sum: the loss sum of the rank's tokens.
        denominator: this rank's part of the denominator of all ranks' sums; 0 on all if no loss is known.
        peak_bytes: the most memory that the rank has had.
        timings: the timings of its micro-batches, in order.
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
        """Return the measurement that `encode` encoded."""
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


def step_measurement(
    plan: StepPlan, ranks: Sequence[RankMeasurement], *, loss: float, is_first: bool, **facts: Any
) -> StepMeasurement:
    """Return the measured step of all ranks, with its planned seconds.

    Args:
        plan: the step in the plan.
        ranks: their measurements, rank 0 first.
        loss: the loss of the step.
        is_first: whether the loop began with it, so that its seconds count warming up.
        facts: further fields of a step's record.
    """
    return StepMeasurement(
        step=plan.step,
        loss=loss,
        tokens=int(plan.tokens.sum()),
        seconds=ranks[0].seconds,
        predicted_seconds=plan.makespan_seconds,
        ranks=[_planned_timings(rank.timings, plan) for rank in ranks],
        warm_up=is_first,
        peak_bytes=[rank.peak_bytes for rank in ranks],
        **facts,
    )


def _planned_timings(timings: Sequence[Timing], plan: StepPlan) -> list[TimingRecord]:
    """Return measured micro-batches with their planned seconds."""
    return [
        TimingRecord(
            order=order,
            degree=int(plan.degrees[order]),
            tokens=int(plan.tokens[order]),
            predicted_seconds=float(plan.seconds[order]),
            start_seconds=start,
            seconds=took,
        )
        for order, start, took in timings
    ]


def mean_loss(ranks: Mapping[int, RankMeasurement]) -> float:
    """Return the step's loss from the sums of all ranks; NaN if they know none."""
    denominator = sum(rank.denominator for rank in ranks.values())
    return sum(rank.loss_sum for rank in ranks.values()) / denominator if denominator else math.nan
