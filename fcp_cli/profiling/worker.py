"""Measures on the ranks of a job: `torchrun ... -m fcp_cli.profiling.worker REQUEST.json`, which `fcp profile` starts.

Rank 0 decides what comes next and appends every observation to the samples file at once; the other ranks follow.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcp_cli.machine.host import usable_cores
from fcp_cli.models.memory import PRECISIONS, precision_name
from fcp_cli.models.model import load_model
from fcp_cli.profiling.device import (
    PeakMemory,
    Stopwatch,
    clocks,
    device_memory_bytes,
    device_name,
    ranks_on_this_host,
)
from fcp_cli.profiling.measurement import Measurement, read_measurement
from fcp_cli.profiling.points import LEAST_SIDE, P, Point, VisionPoint, points_that_fit, vision_points_that_fit
from fcp_cli.profiling.samples import append_line, read_samples
from fcp_cli.profiling.schedule import Schedule, Task
from fcp_cli.profiling.vision_workload import VisionWorkload, build_encoder
from fcp_cli.profiling.workload import SilentTransport, Workload, build_model, groups_of
from fcp_cli.runtime.gradients import PlainSync
from fcp_cli.runtime.transport import ProcessTransport, Transport
from fcp_cli.runtime.world import ProcessWorld, join_process_group, local_device

_TRANSFER_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)  # the first cost a message's fixed part, the last its bytes
_TRANSFER_REPEATS = 12
_STEP_REPEATS = 5
_VISION_BUDGET_SHARE = 0.4  # of the time for the observations of a vision model


def main(argv: list[str]) -> None:
    """Run one request; called by torchrun on every rank."""
    request = read_measurement(Path(argv[0]))
    device = torch.device("cpu") if request.device == "cpu" else local_device()
    if device.type == "cpu":
        torch.set_num_threads(1)  # one core per rank, as the bundled trainer runs
    owns = join_process_group(device)
    try:
        Measurer(request, device).run()
    finally:
        if owns:
            dist.destroy_process_group()


class Measurer:
    """One rank's part in a measurement."""

    def __init__(self, request: Measurement, device: torch.device) -> None:
        self.request = request
        self.device = device
        self.world = ProcessWorld()
        self.ranks_per_node = ranks_on_this_host()
        self.launcher = os.getppid()
        self.shares_cores = device.type == "cpu" and self.ranks_per_node > usable_cores()
        self.stopwatch = Stopwatch(device, shares_cores=self.shares_cores)
        self.transport: Transport = SilentTransport() if request.emulate else ProcessTransport.create(device)
        self.spec = load_model(request.model)
        self.workload = Workload(
            build_model(self.spec, max(request.layers), device), device, request.dtype, self.transport
        )
        self.device_bytes = device_memory_bytes(device, ranks_on_host=self.ranks_per_node)
        precision = PRECISIONS[precision_name(request.dtype)]
        measured = replace(self.spec, num_layers=max(request.layers))
        asked, asked_calls = request.points(), request.vision_points()
        self.points = points_that_fit(asked, measured, precision, device_bytes=self.device_bytes)
        self.schedule = Schedule(self.points, request.layers)
        calls = vision_points_that_fit(asked_calls, self.spec, precision, device_bytes=self.device_bytes)
        self.vision_schedule = Schedule(calls, request.vision_layers)
        self.vision: VisionWorkload | None = None
        if asked_calls:
            encoder = build_encoder(self.spec, max(request.vision_layers), device)
            self.vision = VisionWorkload(encoder, device, request.dtype)
        kept = {*(point.key for point in self.points), *(call.key for call in calls)}
        keys = [*(point.key for point in asked), *(call.key for call in asked_calls)]
        self.left_out = [key for key in keys if key not in kept]

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    def run(self) -> None:
        self._resume()
        self._write(kind="environment", **self._environment())
        if self.left_out:
            self._write(kind="left_out", points=self.left_out, reason="more memory than a rank has")
        if self.world.size > 1 and not self.request.emulate:
            self._transfers()
        self._warm_up()
        for_vision = _VISION_BUDGET_SHARE if self.vision else 0.0
        self._observations(self.schedule, self._observe, (1 - for_vision) * self.request.budget_seconds)
        if self.vision:
            self._observations(self.vision_schedule, self._observe_vision, for_vision * self.request.budget_seconds)
        self._step()
        if max(self.request.layers) == self.spec.num_layers:
            self._memory()
            if self.vision:
                self._vision_memory(self.vision)
        self._write(kind="finished", at=_now())

    def _write(self, **line: Any) -> None:
        if self.is_first:
            append_line(self.request.samples, line)

    def _resume(self) -> None:
        samples = read_samples(self.request.samples)
        counts = {*self.request.layers, *self.request.vision_layers}
        observed = {
            (layers, key): seconds for layers in counts for key, seconds in samples.seconds_by_point(layers).items()
        }
        self.schedule.resume(observed)
        self.vision_schedule.resume(observed)

    def _environment(self) -> dict[str, Any]:
        import transformers

        return {
            "at": _now(),
            "device": self.device.type,
            "device_name": device_name(self.device),
            "ranks": self.world.size,
            "ranks_per_node": self.ranks_per_node,
            "cores": usable_cores(),
            "shares_cores": self.shares_cores,
            "device_memory_bytes": self.device_bytes,
            "clocks": clocks(self.device),
            "dtype": self.request.dtype,
            "threads_per_rank": torch.get_num_threads() if self.device.type == "cpu" else None,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "system": platform.platform(terse=True),
        }

    def _transfers(self) -> None:
        """Time messages: every rank sends to one neighbour and receives from another, within nodes, then across."""
        tiers = {"intra_node": 1}
        if self.world.size > self.ranks_per_node:
            tiers["inter_node"] = self.ranks_per_node
        for tier, shift in tiers.items():
            for num_bytes in _TRANSFER_BYTES:
                seconds = [self._transfer(shift, num_bytes) for _ in range(_TRANSFER_REPEATS)]
                self._write(kind="transfer", tier=tier, bytes=num_bytes, seconds=seconds)

    def _transfer(self, shift: int, num_bytes: int) -> float:
        rank, size = self.world.rank, self.world.size
        send = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        receive = torch.empty_like(send)

        def work() -> None:
            self.transport.start("kv", send, (rank + shift) % size, receive, (rank - shift) % size).wait()

        dist.barrier()  # a late start of one rank would be measured as waiting by the others
        return min(self._gather(self.stopwatch.measure(work)))

    def _gather(self, seconds: float) -> list[float]:
        """Return every rank's seconds."""
        mine = torch.tensor([seconds], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(everyone, mine)
        return [float(value) for value in everyone]

    def _warm_up(self) -> None:
        """Run each degree once or twice: the first call of a kernel compiles and allocates, later ones do not."""
        # A set of small integers has one order on all ranks, which run this together; points come cheapest first.
        for degree in {point.degree for point in self.points}:
            cheapest = next(point for point in self.points if point.degree == degree)
            for _ in range(2):
                self._observe(Task(point=cheapest, layers=max(self.request.layers)))
        for task in self.vision_schedule.tasks[:2]:
            self._observe_vision(task)

    def _observations(
        self, schedule: Schedule[P], observe: Callable[[Task[P]], list[float]], budget_seconds: float
    ) -> None:
        deadline = time.monotonic() + budget_seconds
        while (position := self._agree_on_next(schedule, deadline)) is not None:
            task = schedule.tasks[position]
            seconds = observe(task)
            schedule.add(position, seconds)
            self._write(kind="observation", point=task.point.key, layers=task.layers, seconds=seconds)

    def _agree_on_next(self, schedule: Schedule[P], deadline: float) -> int | None:
        # A torchrun that was killed leaves its ranks running, and no one else would ever end them.
        if os.getppid() != self.launcher:
            raise SystemExit("the launcher is gone")
        position = schedule.next(deadline - time.monotonic()) if self.is_first else None
        chosen = self._of_first(-1 if position is None else position)
        return None if chosen < 0 else chosen

    def _observe(self, task: Task[Point]) -> list[float]:
        """Return the seconds of each group that ran the point: those of the member that was disturbed least.

        Members end together, so one that another had to wait for shows the work itself, and the others show waiting.
        Where ranks share cores they take turns, and what counts is from the first start to the last end; ranks that are
        left over run the pack among themselves, so that no core is lent.
        """
        self.workload.set_layers(task.layers)
        if self.request.emulate:
            # The first and the last member: their chunks are the longest and the shortest that the layout makes.
            lengths, members = task.point.lengths, range(task.point.degree)
            works = [self.workload.microbatch(lengths, members, index) for index in {members[0], members[-1]}]
            return [max(map(self.stopwatch.measure, works))]
        groups = groups_of(task.point, world=self.world.size, ranks_per_node=self.ranks_per_node)
        left_over = tuple(sorted(set(range(self.world.size)).difference(*groups))) if self.shares_cores else ()
        mine = next((group for group in (*groups, left_over) if self.world.rank in group), None)
        work = None if mine is None else self.workload.microbatch(task.point.lengths, mine, mine.index(self.world.rank))
        dist.barrier()
        everyone = self._gather(self.stopwatch.measure(work) if work else 0.0)
        if self.shares_cores:
            return [max(everyone[rank] for group in groups for rank in group)]
        return [min(everyone[rank] for rank in group) for group in groups]

    def _observe_vision(self, task: Task[VisionPoint]) -> list[float]:
        """Return the seconds of every rank; all run the same parts, since encoders do not wait for each other."""
        assert self.vision is not None
        self.vision.set_blocks(task.layers)
        work = self.vision.call(task.point)
        dist.barrier()
        everyone = self._gather(self.stopwatch.measure(work))
        return [max(everyone)] if self.shares_cores else everyone

    def _step(self) -> None:
        """Time what a step costs beside its micro-batches: gradients summed over ranks, clipped, and AdamW."""
        model = self.workload.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # weights stay, whatever the repeats
        sync = PlainSync(model, self.world)

        def work() -> None:
            sync.reduce()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        seconds = []
        for _ in range(_STEP_REPEATS):
            dist.barrier()
            everyone = self._gather(self.stopwatch.measure(work))
            seconds.append(max(everyone) if self.shares_cores else min(everyone))
        self._write(kind="step", layers=max(self.request.layers), seconds=seconds, state_bytes=state_bytes(optimizer))

    def _memory(self) -> None:
        """Read peak bytes of growing packs on one rank; the largest is the longest that was observed at degree 1."""
        observed = [
            task.point.lengths[0]
            for task, seconds in zip(self.schedule.tasks, self.schedule.seconds, strict=True)
            if seconds and task.point.degree == 1 and len(task.point.lengths) == 1
        ]
        self.workload.set_layers(max(self.request.layers))
        longest = self._of_first(max(observed, default=512))
        for tokens in (longest // 4, longest // 2, longest):
            self._peak(self.workload.microbatch((tokens,), (self.world.rank,), 0), kind="memory", tokens=tokens)

    def _vision_memory(self, vision: VisionWorkload) -> None:
        """Read peak bytes of growing numbers of parts of one size, up to the largest call that was observed."""
        observed = [
            task.point.patches
            for task, seconds in zip(self.vision_schedule.tasks, self.vision_schedule.seconds, strict=True)
            if seconds and task.point.trained
        ]
        vision.set_blocks(max(self.request.vision_layers))
        most = self._of_first(max(observed, default=8 * LEAST_SIDE**2)) // LEAST_SIDE**2
        for parts in (most // 4, most // 2, most):
            point = VisionPoint(sides=(LEAST_SIDE,) * parts, trained=True)
            self._peak(vision.call(point), kind="vision_memory", patches=point.patches)

    def _peak(self, work: Callable[[], None], **line: Any) -> None:
        """Write down by how much a piece of work raises this rank's peak."""
        # Freed memory goes back to the system first: a CPU's peak is the resident size, not what is in use.
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        peak = PeakMemory(self.device)
        peak.reset()
        before = peak.peak_bytes()
        work()
        after = peak.peak_bytes()
        if before is not None and after is not None:
            self._write(**line, peak_bytes=after - before)

    def _of_first(self, value: int) -> int:
        """Return rank 0's value on every rank."""
        shared = torch.tensor([value], dtype=torch.int64)
        self.world.broadcast(shared)
        return int(shared)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients and optimizer state, counted tensor by tensor."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = 0 if parameter.grad is None else parameter.grad.nbytes
            state = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
            total += parameter.nbytes + gradient + sum(value.nbytes for value in state)
    return total


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
