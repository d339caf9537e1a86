"""Metrics of a MindSpore job (`fcp-metrics/1`), gathered from all ranks after each step and written by rank 0.

PyNative mode is asynchronous, so each micro-batch ends with a device synchronization if metrics are enabled.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mindspore
import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import FcpError
from fcp_cli.integrations.mindspore.ranks import MindSporeRanks
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics.metrics import MetricsWriter
from fcp_cli.runtime.metrics.message import RankMeasurement, measured_record
from fcp_cli.runtime.metrics.run_record import METRICS_VARIABLE, begin_metrics, run_record


class MeasuredSteps:
    """Recorder of one rank's steps, enabled if FCP_METRICS is set on all ranks. Creation is collective."""

    def __init__(self, plan: Path, metadata: PlanMetadata, ranks: MindSporeRanks, first_step: int) -> None:
        path = os.environ.get(METRICS_VARIABLE)
        self.is_on = bool(ranks.gather(np.array([int(bool(path))])).all())
        self._ranks, self._first_step, self._index = ranks, first_step, first_step
        self._writer: MetricsWriter | None = None
        self._timings: list[tuple[int, float, float]] = []
        self.loss = math.nan  # of the current step
        if self.is_on and path and ranks.rank == 0:
            begin_metrics(Path(path), first_step)
            self._plans: Iterator[StepPlan] = PlanReader(plan).steps(first_step)
            self._writer = MetricsWriter(Path(path))
            target = str(mindspore.get_context("device_target")).lower()
            name = platform.processor() or platform.machine()
            facts = {"device_name": name if target == "cpu" else target, "mindspore": mindspore.__version__}
            self._writer.write(run_record(plan, metadata, first_step=first_step, device=target, **facts))
        self._began = self._entered = time.perf_counter()

    def enter(self) -> None:
        """Record the start of a micro-batch."""
        self._entered = time.perf_counter()

    def leave(self, order: int) -> None:
        """Record the end of a micro-batch, once the device has run it."""
        if self.is_on:
            _wait_for_device()
            start = self._entered - self._began
            self._timings.append((order, start, time.perf_counter() - self._entered))

    def end(self) -> None:
        """Record the end of a step, including its optimizer step, and gather all measurements. Collective."""
        if not self.is_on:
            return
        _wait_for_device()
        now = time.perf_counter()
        first = self._timings[0][1]
        mine = RankMeasurement(
            step=self._index,
            seconds=now - self._began,
            loss_sum=0.0,
            denominator=0.0,
            peak_bytes=_peak_memory_bytes(),
            timings=[(order, start - first, took) for order, start, took in self._timings],
        )
        messages = self._gather(mine.encode())
        if self._writer is not None:
            self._write([RankMeasurement.decode(message) for message in messages])
        self._index += 1
        self._timings, self.loss = [], math.nan
        self._began = now

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _gather(self, message: bytes) -> list[bytes]:
        """Gather messages of different lengths from all ranks, encoded as integers for MindSpore."""
        words: IntArray = np.frombuffer(message, dtype="<i4").astype(np.int64)
        lengths = self._ranks.gather(np.array([len(words)]))[:, 0].tolist()
        padded = np.zeros(max(lengths), dtype=np.int64)
        padded[: len(words)] = words
        table = self._ranks.gather(padded)
        return [row[:length].astype("<i4").tobytes() for row, length in zip(table, lengths, strict=True)]

    def _write(self, ranks: list[RankMeasurement]) -> None:
        plan = next(self._plans)
        record = measured_record(plan, ranks, loss=self.loss, is_first=self._index == self._first_step)
        assert self._writer is not None
        try:
            self._writer.write(record)
        except (OSError, FcpError) as error:  # does not abort training
            print(f"fcp: the metrics {self._writer.path} end here: {error}", file=sys.stderr, flush=True)
            self.close()


def _is_on_host() -> bool:
    return str(mindspore.get_context("device_target")) == "CPU"


def _wait_for_device() -> None:
    """Synchronize with the device, except on CPUs, where MindSpore lacks it and logs an error."""
    if not _is_on_host():
        mindspore.runtime.synchronize()


def _peak_memory_bytes() -> int:
    """Return this rank's peak allocated device memory; on CPUs, its peak resident memory."""
    if _is_on_host():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    most: int = mindspore.runtime.max_memory_allocated()
    return most
