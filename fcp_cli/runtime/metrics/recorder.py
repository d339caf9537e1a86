"""Measure the steps of a training loop of any framework, and write them on rank 0 (`fcp-metrics/1`).

A rank records clock marks, which costs the host microseconds and never waits for the device. Once the device has passed
a step's last mark, in a later micro-batch, the rank sends its measurement through the job's store. Rank 0 writes the
step when it has those of all ranks.
"""

from __future__ import annotations

import atexit
import itertools
import os
import platform
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fcp_cli.errors import FcpError
from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics.metrics import MetricsWriter
from fcp_cli.runs.recorded_steps import recorded_steps, unrecorded
from fcp_cli.runtime.data.followed_step import FollowedStep
from fcp_cli.runtime.data.prefetch import Prefetched
from fcp_cli.runtime.metrics.mailbox import MessageLostError, MetricsMailbox, job_store
from fcp_cli.runtime.metrics.message import RankMeasurement, mean_loss, measured_record
from fcp_cli.runtime.metrics.run_record import METRICS_VARIABLE, begin_metrics, run_record
from fcp_cli.runtime.metrics.running_step import RunningStep
from fcp_cli.runtime.metrics.timing import clock_for

_LOOK_SECONDS = 0.5  # between rank 0's polls for messages, while a step runs
_LAST_SECONDS = 30.0  # timeout for the other ranks' last messages when the loop is over
_PLANS_AHEAD = 2


AnyStep = TypeVar("AnyStep", bound=FollowedStep)


class Recorder:
    """Measures one rank's steps; on rank 0, writes those of all ranks.

    If writing or reaching rank 0 fails, recording stops with one line, and training continues.

    Args:
        path: metrics file.
        plan: plan file.
        metadata: metadata of the plan.
        rank: rank in the plan; one process per rank records.
        device: device of the rank.
        store: rendezvous store of the job.

    Attributes:
        listeners: called on rank 0 with each written record.
        followed: steps of a stream in the order they are trained, or None to read them from the plan.
        utilisation: on rank 0, maps a step's plan and seconds to the fraction of peak FLOP/s (MFU), or None if unknown.
    """

    def __init__(
        self, path: Path, *, plan: Path, metadata: PlanMetadata, rank: int, device: torch.device, store: Any
    ) -> None:
        self.path, self.rank = path, rank
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.followed: deque[StepPlan] | None = None
        self.utilisation: Callable[[StepPlan, float], float | None] = lambda plan, seconds: None
        self._plan, self._metadata, self._device = plan, metadata, device
        self._clock = clock_for(device)
        self._store: Any = store
        self._mailbox: MetricsMailbox | None = MetricsMailbox(store, metadata.num_ranks)
        self._writer: MetricsWriter | None = None
        self._plans: Prefetched[StepPlan] | None = None
        self._first_step = self._next_step = -1
        self._current: RunningStep | None = None
        self._waiting: deque[RunningStep] = deque()  # over, but perhaps not yet on the device
        self._uncollected: deque[RunningStep] = deque()  # on rank 0: steps whose messages of other ranks are missing
        self._looked = 0.0
        self._hook: Any = None
        _recorders.add(self)

    @property
    def is_open(self) -> bool:
        """Return whether it records now or can be opened."""
        return self._mailbox is not None

    def open(self, first_step: int, **facts: Any) -> None:
        """Begin or resume a run: rank 0 drops the records of steps that will run again.

        Args:
            first_step: optimizer step.
            facts: fields that override those of the `run` record.
        """
        if first_step == self._next_step:
            return
        self.flush()
        self._first_step = self._next_step = first_step
        if self._mailbox is not None:  # an earlier loop may have left messages of the same steps
            self._mailbox = MetricsMailbox(self._store, self._metadata.num_ranks, loop=next(_loops))
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(_ends_step(weakref.ref(self)))
            atexit.register(close_all)
        if self.rank:
            return
        begin_metrics(self.path, first_step)
        recorded = max(recorded_steps(self.path), self._metadata.first_step)
        if recorded < first_step:
            _say(f"{unrecorded(recorded + 1, first_step)} in no record: the metrics {self.path} end before this start")
        self._writer = self._writer or MetricsWriter(self.path)
        if self._plans is not None:
            self._plans.close()
        # Steps of a stream are in memory once they are trained: there is nothing to read ahead.
        is_planned = self.followed is None
        plans = PlanReader(self._plan).steps(first_step) if self.followed is None else _taken(self.followed)
        self._plans = Prefetched(plans, depth=_PLANS_AHEAD if is_planned else 0, name="fcp-metrics")
        device = {"device": self._device.type, "device_name": device_name(self._device), "torch": torch.__version__}
        self.write({**run_record(self._plan, self._metadata, first_step=first_step, **device), **facts})

    def recorded(self, steps: Generator[AnyStep, None, None]) -> Generator[AnyStep, None, None]:
        """Yield the steps of a loop, measuring each from its request to its last optimizer step."""
        try:
            while True:
                begin = self._clock.mark()
                step = next(steps, None)
                if step is None:
                    return
                step.record = self.begin(step.index, step.predicted_seconds, begin)
                yield step
                self.end()
        finally:
            steps.close()
            self.end()
            self.flush()

    def begin(self, step: int, predicted_seconds: float, begin: Any = None) -> RunningStep:
        """Start to measure a step, at mark `begin` or now."""
        self.end()
        self._current = RunningStep(
            step=step, predicted_seconds=predicted_seconds, begin=self._clock.mark() if begin is None else begin
        )
        return self._current

    def enter(self) -> None:
        """Record the start of a micro-batch; sends measurements that have become available."""
        if self._waiting or self._uncollected:
            self._advance()

    def end(self) -> None:
        """Record the end of the current step; an incomplete step is dropped."""
        record, self._current = self._current, None
        if record is None or not record.is_whole:
            return
        record.end = record.end or self._clock.mark()
        self._next_step = record.step + 1
        self._waiting.append(record)
        self._advance()

    def note_update(self, learning_rate: Any) -> None:
        """Record that an optimizer has stepped; the last one before `end` ends the step."""
        if self._current is not None and self._current.is_whole:
            self._current.end = self._clock.mark()
            if isinstance(learning_rate, float):
                self._current.facts.setdefault("learning_rate", learning_rate)

    def write(self, record: dict[str, Any]) -> None:
        """Write a record on rank 0, after all finished steps, and pass it to the listeners."""
        if self._uncollected:
            self.flush()
        self._write(record)

    def flush(self) -> None:
        """Send finished steps, waiting for the device; rank 0 writes those that all ranks have sent."""
        self._advance(waits=True)
        until = time.monotonic() + _LAST_SECONDS
        while self._uncollected and time.monotonic() < until:
            time.sleep(1e-3)
            self._collect()
        if self._uncollected and self._mailbox is not None:
            steps = " and ".join(str(record.step) for record in self._uncollected)
            ranks = ", ".join(map(str, self._mailbox.silent_ranks()[:4]))
            _say(f"the metrics {self.path} lack step {steps}: no word of it from rank {ranks} in {_LAST_SECONDS:g} s")
            self._uncollected.clear()

    def sync(self) -> None:
        """Flush the records to disk."""
        with suppress(OSError):
            if self._writer is not None:
                self._writer.sync()

    def close(self) -> None:
        """Write finished steps and close the file; after an exception, do not wait for other ranks."""
        if hasattr(sys, "last_value"):
            self._advance()
        else:
            self.end()
            self.flush()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._plans is not None:
            self._plans.close()
        if self._writer is not None:
            self._writer.close()
        self._writer, self._plans, self._mailbox = None, None, None

    def _advance(self, *, waits: bool = False) -> None:
        """Send the steps that the device has finished; on rank 0, poll for those of all ranks once in a while."""
        try:
            while self._waiting and (waits or self._clock.has_passed(self._waiting[0].end)):
                record = self._waiting.popleft()
                if self._mailbox is not None:
                    self._mailbox.leave(self.rank, record.measured(self._clock, self._device))
                    if self.rank == 0:
                        self._uncollected.append(record)
                        self._looked = 0.0
        except (RuntimeError, OSError) as error:
            self._give_up(error)
        now = time.monotonic()
        if self._uncollected and (waits or now - self._looked > _LOOK_SECONDS):
            self._looked = now
            self._collect()

    def _collect(self) -> None:
        try:
            while self._uncollected and self._mailbox is not None:
                try:
                    ranks = self._mailbox.collect(self._uncollected[0].step)
                except MessageLostError:  # skip this step only
                    self._uncollected.popleft()
                    continue
                if ranks is None:
                    return
                self._write(self._record(self._uncollected.popleft(), ranks))
        except (RuntimeError, OSError, FcpError, StopIteration) as error:
            self._give_up(error)

    def _record(self, record: RunningStep, ranks: dict[int, RankMeasurement]) -> dict[str, Any]:
        assert self._plans is not None
        plan = next(self._plans)
        while plan.step < record.step:
            plan = next(self._plans)
        facts = {"loss": mean_loss(ranks), "mfu": self.utilisation(plan, ranks[0].seconds), **record.facts}
        is_first = record.step == self._first_step
        return measured_record(plan, [ranks[rank] for rank in sorted(ranks)], is_first=is_first, **facts)

    def _write(self, record: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(record)
        except OSError as error:
            self._give_up(error)
        for listener in self.listeners:
            listener(record)

    def _give_up(self, error: BaseException) -> None:
        """Stop recording with one line: failing metrics must not abort training."""
        if self._mailbox is not None and self.rank == 0:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _say(f"the metrics {self.path} end here: {line}")
        self._mailbox = None
        self._waiting.clear()
        self._uncollected.clear()


def recorder_of(
    path: str | Path | None, *, plan: Path, metadata: PlanMetadata, rank: int, device: torch.device
) -> Recorder | None:
    """Return a recorder for a loop's steps, or None without a file or if this process already records into it.

    Args:
        path: metrics file, or None for FCP_METRICS.
        plan, metadata, rank, device: as for `Recorder`.
    """
    path = path or os.environ.get(METRICS_VARIABLE)
    if not path or any(one.is_open and one.path == Path(path) for one in _recorders):
        return None
    if (store := job_store()) is None:
        return None
    return Recorder(Path(path), plan=plan, metadata=metadata, rank=rank, device=device, store=store)


def close_all() -> None:
    """Write the finished steps of every loop of this process, before the job ends."""
    for recorder in list(_recorders):
        recorder.close()


def _taken(steps: deque[StepPlan]) -> Iterator[StepPlan]:
    while steps:
        yield steps.popleft()


_loops = itertools.count(1)  # of this process; all ranks run the same loops
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()  # two recorders of one file would mix their steps


def _ends_step(recorder: weakref.ref[Recorder]) -> Callable[..., None]:
    """Return a hook that ends the recorder's step after each optimizer step."""

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = recorder()
        if found is not None and not torch.compiler.is_compiling():
            groups = optimizer.param_groups
            found.note_update(groups[0].get("lr") if groups else None)

    return hook


def _say(line: str) -> None:
    print(f"fcp: {line}", file=sys.stderr, flush=True)


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or the CPU's architecture."""
    if device.type == "cpu":
        return platform.processor() or platform.machine()
    name: str = torch.get_device_module(device).get_device_name(device)
    return name
