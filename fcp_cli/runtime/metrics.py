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
import resource
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fcp_cli.errors import FcpError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.runs.metrics import MetricsWriter
from fcp_cli.runs.trained_run import recorded_steps, unrecorded
from fcp_cli.runtime.cursor import Prefetched
from fcp_cli.runtime.metrics_message import (
    METRICS_VARIABLE,
    RankMeasurement,
    begin_metrics,
    mean_loss,
    measured_record,
    run_record,
)

_LOOK_SECONDS = 0.5  # between rank 0's polls for messages, while a step runs
_LAST_SECONDS = 30.0  # timeout for the other ranks' last messages when the loop is over
_PLANS_AHEAD = 2


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
        self._current: ClockMarks | None = None
        self._waiting: deque[ClockMarks] = deque()  # over, but perhaps not yet on the device
        self._uncollected: deque[ClockMarks] = deque()  # on rank 0: steps whose messages of other ranks are missing
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
            missing = unrecorded(recorded + 1, first_step)
            _say(f"training continues at step {first_step + 1}; {missing} not in {self.path}: of another run, or lost")
        self._writer = self._writer or MetricsWriter(self.path)
        if self._plans is not None:
            self._plans.close()
        # Steps of a stream are in memory once they are trained: there is nothing to read ahead.
        is_planned = self.followed is None
        plans = PlanReader(self._plan).steps(first_step) if self.followed is None else _taken(self.followed)
        self._plans = Prefetched(plans, depth=_PLANS_AHEAD if is_planned else 0, name="fcp-metrics")
        device = {"device": self._device.type, "device_name": device_name(self._device), "torch": torch.__version__}
        self.write({**run_record(self._plan, self._metadata, first_step=first_step, **device), **facts})

    def begin(self, step: int, predicted_seconds: float, begin: Any = None) -> ClockMarks:
        """Start to measure a step, at mark `begin` or now."""
        self.end()
        self._current = ClockMarks(
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

    def _record(self, record: ClockMarks, ranks: dict[int, RankMeasurement]) -> dict[str, Any]:
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


# Measurement of the running step, until the device has passed its marks.


@dataclass(slots=True, eq=False, kw_only=True)
class ClockMarks:
    """Clock marks, loss share and facts of the step that this rank runs, for its record.

    Attributes:
        step: optimizer step.
        begin, end: marks of its start, and of its end after the last optimizer step; `end` is None before.
        microbatches: (order, begin, end) of each micro-batch.
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
    microbatches: list[tuple[int, Any, Any]] = field(default_factory=list)
    loss_sum: Tensor | None = None
    denominator: Tensor | None = None
    is_whole: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def note_loss(self, sums: list[Tensor], denominator: int | Tensor) -> None:
        """Record the micro-batches' losses (0-d) and the rank's share of the denominator without waiting for them."""
        if sums:
            total = (torch.stack(sums) if len(sums) > 1 else sums[0]).detach().double().sum()
            self.loss_sum = _on_host(total)
            share = denominator if isinstance(denominator, Tensor) else torch.tensor(denominator, device="cpu")
            self.denominator = _on_host(share.double())

    def measured(self, clock: Clock, device: torch.device) -> RankMeasurement:
        """Return the measurements; waits for the device to pass the end."""
        start = self.microbatches[0][1] if self.microbatches else self.begin
        seconds = clock.seconds(self.begin, self.end)  # waits for the device, so the copies are complete, too
        knows_loss = self.loss_sum is not None and self.denominator is not None
        return RankMeasurement(
            step=self.step,
            seconds=seconds,
            loss_sum=float(self.loss_sum) if self.loss_sum is not None else 0.0,
            denominator=float(self.denominator) if knows_loss and self.denominator is not None else 0.0,
            peak_bytes=peak_memory_bytes(device),
            timings=[
                (order, clock.seconds(start, begin), clock.seconds(begin, end))
                for order, begin, end in self.microbatches
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


# Measure when each micro-batch ran, without blocking the host.


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

    def enter_thread(self) -> None:
        """Prepare the current thread for calls of `has_passed`."""

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
        self._index = self._module.current_device() if device.index is None else device.index

    def enter_thread(self) -> None:
        # A new thread's device is 0, where its first call would take some 500 MB for a context.
        self._module.set_device(self._index)

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


# Messages to rank 0 through the job's rendezvous store.
#
# No rank waits for them, and they need no collective, so a loop may end at any point.

# Number of messages kept per rank. Ranks are at most a step apart, since each step compares their inputs.
_SLOTS = 8


class MessageLostError(Exception):
    """A rank ran so far ahead that a later step's message overwrote that of this step."""


class MetricsMailbox:
    """Measurements of all ranks of a job, as messages in its store.

    Args:
        store: the store of torch.distributed.
        num_ranks: number of ranks that send messages.
        loop: number of the loop in the job; separates messages of loops with the same step numbers.
    """

    def __init__(self, store: Any, num_ranks: int, loop: int = 0) -> None:
        self._store: Any = dist.distributed_c10d.PrefixStore(f"fcp-metrics/{loop}", store)
        self._num_ranks = num_ranks
        self._step = -1  # step that is being collected
        self._found: dict[int, RankMeasurement] = {}

    def leave(self, rank: int, measured: RankMeasurement) -> None:
        """Send a rank's message to rank 0: a few packets without a reply."""
        self._store.set(_key(rank, measured.step), measured.encode())

    def collect(self, step: int) -> dict[int, RankMeasurement] | None:
        """Return all ranks' messages of a step, by rank, or None while one is missing. Steps come in order."""
        if step != self._step:
            self._step, self._found = step, {}
        missing = [rank for rank in range(self._num_ranks) if rank not in self._found]
        keys = [_key(rank, step) for rank in missing]
        if not self._store.check(keys):  # reading a missing key would block
            return None
        for rank, message in zip(missing, self._read(keys), strict=True):
            measured = RankMeasurement.decode(message)
            if measured.step > step:
                raise MessageLostError
            if measured.step == step:  # else the slot still holds an older step
                self._found[rank] = measured
        if len(self._found) < self._num_ranks:
            return None
        found, self._found = self._found, {}
        return dict(sorted(found.items()))

    def silent_ranks(self) -> list[int]:
        """Return the ranks whose message of the step being collected is missing."""
        return [rank for rank in range(self._num_ranks) if rank not in self._found and not self._has_left(rank)]

    def _has_left(self, rank: int) -> bool:
        key = _key(rank, self._step)
        return bool(self._store.check([key])) and RankMeasurement.decode(self._store.get(key)).step == self._step

    def _read(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            found: list[bytes] = self._store.multi_get(keys)
            return found
        return [self._store.get(key) for key in keys]


def _key(rank: int, step: int) -> str:
    return f"{rank}/{step % _SLOTS}"


def job_store() -> Any:
    """Return the store of torch.distributed's default process group, or None if this torch release hides it."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()
