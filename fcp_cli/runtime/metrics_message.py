"""Records of a run's metrics in any framework, without torch: its start, and each step as measured by all ranks."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics import FORMAT, Timing, drop_steps_from, step_record
from fcp_cli.runs.owner import own_unless_launched

_HEADER = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasurement:
    """Measurement of a step by one rank, sent to rank 0 as a float64 vector, which holds counts exactly.

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


# Start of a run's metrics in any framework: its folder, file and first line.

METRICS_VARIABLE = "FCP_METRICS"
RUN_DIR_VARIABLE = "FCP_RUN_DIR"
_MODEL_VARIABLE = "FCP_MODEL"


def begin_metrics(path: Path, first_step: int) -> None:
    """Begin or resume the metrics of a run: own its folder, and drop the records of steps that will run again.

    Rank 0 calls it, also in a job that fcp prepared but another launcher started.
    """
    _own_folder_of(path)
    drop_steps_from(path, first_step)


def _own_folder_of(metrics: Path) -> None:
    """Own the folder of a metrics file until this process ends, if it is the job's run folder."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if not run_dir or metrics.absolute().parent != Path(run_dir).absolute():
        return
    owned = own_unless_launched(Path(run_dir))
    if owned is not None:
        atexit.register(owned.release)


def run_record(plan: Path, metadata: PlanMetadata, *, first_step: int, device: str, **facts: str) -> dict[str, Any]:
    """Return the `run` record at the start of a loop.

    Args:
        plan, metadata: plan file and its metadata.
        first_step: optimizer step.
        device: device type.
        facts: device name and framework version.
    """
    return {
        "format": FORMAT,
        "kind": "run",
        "plan_hash": metadata.plan_hash,
        "plan": str(plan),
        "num_ranks": metadata.num_ranks,
        "ranks_per_node": metadata.ranks_per_node,
        "sync": metadata.sync,
        # Not the cost profile's model, which may be a placeholder: the script's model is only known if given.
        "model": os.environ.get(_MODEL_VARIABLE),
        "device": device,
        **facts,
        "started": datetime.now(timezone.utc).isoformat(),
        "first_step": first_step,
        "steps": metadata.end_step,
        "program": sys.argv[0],
    }
