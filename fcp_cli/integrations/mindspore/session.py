"""Session of a MindSpore training loop: this rank's planned micro-batches on their rings, and sums over all ranks.

session = fcp_cli.integrations.mindspore.start("plan.parquet", fetch)
for step in session.steps():
    for microbatch in step:
        loss, grads = value_and_grad(forward, None, weights)(microbatch)
        step.add(loss, grads)
    loss, grads = step.summed()
    optimizer(grads)

`forward` returns `microbatch.loss(logits)`.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mindspore
import numpy as np
from mindspore import Tensor, ops

from fcp_cli.errors import FcpError, RunError
from fcp_cli.integrations.mindspore.ring import MindSporeRanks, MindSporeRing, join
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.runs.metrics import MetricsWriter
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.cursor import PlanCursor, RankMicroBatches, plan_path, require_length
from fcp_cli.runtime.launcher import end_with_launcher
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.metrics_message import (
    METRICS_VARIABLE,
    RankMeasurement,
    begin_metrics,
    measured_record,
    run_record,
)
from fcp_cli.runtime.plan_agreement import agree_by, require_causal, require_training
from fcp_cli.util.arrays import IntArray

Fetch: TypeAlias = Callable[[int], Any]
"""From a manifest row to the sequence's tokens: a list or array of integers."""

_NO_ATTENTION = (
    "the model never called fcp_cli.integrations.mindspore.attention with its ring; call it in place of the "
    "model's own attention"
)


def start(plan: str | Path | None = None, fetch: Fetch | None = None) -> MindSporeSession:
    """Join the job, and validate that all ranks follow the same plan. Collective; called once on every rank.

    Args:
        plan: plan file; defaults to FCP_PLAN, which `fcp launch` sets.
        fetch: function from a manifest row to its tokens; required.

    Raises:
        PlanError: the plan is missing, damaged or was edited.
        RunError: no plan or no `fetch`, ranks have different plans, or the plan is for another number of ranks.
    """
    path = plan_path(plan)
    if fetch is None:
        raise RunError("no data: pass fetch=..., a function from manifest row to tokens")
    ranks = join()
    end_with_launcher()
    metadata = agree_by(path, ranks.gather)
    require_training(metadata, path, "MindSpore")
    require_causal(metadata, path, "MindSpore's rings")
    if metadata.attention is not None:
        raise RunError(
            f"{path} has groups whose ranks share heads, which MindSpore's rings cannot run; plan with 'fcp plan "
            "--attention ring'"
        )
    return MindSporeSession(plan=path, metadata=metadata, fetch=fetch, ranks=ranks)


class MindSporeSession:
    """One rank of a job that follows a plan. Created by `start`.

    Attributes:
        plan, metadata: plan file and its metadata.
        ranks: all ranks of the job.
    """

    def __init__(self, *, plan: Path, metadata: PlanMetadata, fetch: Fetch, ranks: MindSporeRanks) -> None:
        self.plan = plan
        self.metadata = metadata
        self.ranks = ranks
        self._fetch = fetch

    @property
    def rank(self) -> int:
        return self.ranks.rank

    def steps(self, *, first_step: int = 0) -> Generator[MindSporeStep, None, None]:
        """Yield the plan's steps from `first_step` on; iterate over each completely before the next.

        If FCP_METRICS names a file, as under `fcp launch`, a step is recorded when the next one is requested.
        """
        measured = MeasuredSteps(self.plan, self.metadata, self.ranks, first_step)
        cursor = PlanCursor(self.plan, self.rank, first_step=first_step)
        try:
            for own in cursor:
                step = MindSporeStep(own, self._fetch, self.ranks, measured)
                yield step
                step.require_finished()
                measured.end()
        finally:
            cursor.close()
            measured.close()


class MindSporeMicroBatch:
    """One rank's shard of one micro-batch.

    Attributes:
        row: row of the plan.
        ring: ring to pass to `attention`.
        input_ids, position_ids, labels: [1, tokens] int32; at least one token. Labels are the next tokens, -100 at the
            end of a sequence.
    """

    __slots__ = ("_step_tokens", "input_ids", "labels", "position_ids", "ring", "row")

    def __init__(self, row: MicroBatch, ring: MindSporeRing, fetch: Fetch, *, step_tokens: int) -> None:
        self.row = row
        self.ring = ring
        self._step_tokens = step_tokens
        tokens, positions, labels = _shard(row, ring, fetch)
        self.input_ids, self.position_ids, self.labels = (
            Tensor(values[None].astype(np.int32)) for values in (tokens, positions, labels)
        )

    def loss(self, logits: Tensor) -> Tensor:
        """Return this rank's part of the step's loss: its summed token losses / loss tokens of the global batch.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        flat = logits.reshape(-1, logits.shape[-1]).astype(mindspore.float32)
        labels = self.labels.reshape(-1)
        predicted = labels != IGNORED
        losses = ops.cross_entropy(flat, ops.select(predicted, labels, ops.zeros_like(labels)), reduction="none")
        return (losses * predicted.astype(mindspore.float32)).sum() / max(self._step_tokens, 1)


class MindSporeStep:
    """One optimizer step of one rank; iterate over it completely to get the micro-batches.

    Attributes:
        index: optimizer step, from 0.
        predicted_seconds, bound_seconds: the plan's makespan and lower bound.
        tokens: tokens of the global batch with a loss: all but the last of each sequence.
    """

    def __init__(
        self, own: RankMicroBatches[Any], fetch: Fetch, ranks: MindSporeRanks, measured: MeasuredSteps
    ) -> None:
        self.index, self.tokens = own.step, own.loss_tokens
        self.predicted_seconds, self.bound_seconds = own.makespan_seconds, own.bound_seconds
        self._own = own
        self._measured = measured
        self._fetch = fetch
        self._ranks = ranks
        self._loss: Tensor | None = None
        self._grads: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches."""
        return len(self._own)

    def require_finished(self) -> None:
        """Raise RunError unless every micro-batch was run."""
        self._own.require_finished()

    def __iter__(self) -> Iterator[MindSporeMicroBatch]:
        self._own.begin()
        for row in self._own.rows:
            layout, index = shard_layout(row.lengths, row.degree), row.ranks.index(self._ranks.rank)
            ring = MindSporeRing(layout=layout, index=index, ranks=row.ranks, world=self._ranks)
            microbatch = MindSporeMicroBatch(row, ring, self._fetch, step_tokens=self.tokens)
            self._measured.enter()
            yield microbatch
            self._measured.leave(row.order)
            self._own.require_attention(row, ring, _NO_ATTENTION)
            self._own.num_run += 1
        self._own.is_finished = True

    def add(self, loss: Tensor, grads: Sequence[Tensor]) -> None:
        """Accumulate one micro-batch's loss and gradients."""
        if self._loss is None:
            self._loss, self._grads = loss, list(grads)
            return
        self._loss = self._loss + loss
        self._grads = [total + grad for total, grad in zip(self._grads, grads, strict=True)]

    def summed(self) -> tuple[float, tuple[Tensor, ...]]:
        """Sum loss and gradients over all ranks. Collective, after the last micro-batch."""
        self.require_finished()
        if self._loss is None:
            raise RunError(f"step {self.index} has no gradients; call step.add(loss, grads) for every micro-batch")
        loss = float(self._ranks.sum(self._loss.reshape(1)).asnumpy()[0])
        self._measured.loss = loss
        return loss, tuple(self._ranks.sum(grad) for grad in self._grads)


def _shard(row: MicroBatch, ring: MindSporeRing, fetch: Fetch) -> tuple[IntArray, IntArray, IntArray]:
    """Return the tokens, positions and labels of this rank; one pad token if it has none."""
    if not ring.tokens:
        pad = np.zeros(1, dtype=np.int64)
        return pad, pad, np.full(1, IGNORED, dtype=np.int64)
    sequences = [_sequence(fetch, at, length) for at, length in zip(row.sequences, row.lengths, strict=True)]
    index = ring.layout.index(ring.index)
    labels = [np.append(tokens[1:], IGNORED) for tokens in sequences]
    return np.concatenate(sequences)[index], ring.layout.position_ids(ring.index), np.concatenate(labels)[index]


def _sequence(fetch: Fetch, at: int, length: int) -> IntArray:
    tokens: IntArray = np.asarray(fetch(at), dtype=np.int64)
    if tokens.ndim != 1:
        raise RunError(f"fetch returned an array of shape {tokens.shape} for row {at} of the data, not its tokens")
    require_length(len(tokens), length, row=at)
    return tokens[:length]


# Metrics (`fcp-metrics/1`), gathered from all ranks after each step and written by rank 0.
#
# PyNative mode is asynchronous, so each micro-batch ends with a device synchronization if metrics are enabled.


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
