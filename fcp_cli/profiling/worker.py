"""Measuring worker: torchrun starts this module on all ranks with a request file, for `fcp profile`.

Rank 0 chooses each observation and appends it to the samples file; the other ranks follow.
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
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fcp_cli.cost.kernels import KernelTable
from fcp_cli.models.model import load_model
from fcp_cli.profiling.points import LEAST_SIDE, Footprint, P, Point, Schedule, Task, VisionPoint
from fcp_cli.profiling.samples import Measurement, append_line, read_measurement, read_samples
from fcp_cli.profiling.timing import (
    Messenger,
    Stopwatch,
    clocks,
    device_memory_bytes,
    device_name,
    fresh_links,
    gathered,
    links,
    message_sizes,
    most_message_bytes,
    peak_bytes,
    ranks_on_this_host,
    reset_peak,
    sm_clock_mhz,
    time_kernels,
)
from fcp_cli.profiling.workload import (
    SilentTransport,
    UpdateStep,
    VisionWorkload,
    Workload,
    build_encoder,
    build_model,
    groups_of,
    state_bytes,
)
from fcp_cli.runtime.kernels import prefer
from fcp_cli.runtime.kernels.select import Preference, Signature
from fcp_cli.runtime.transport import ProcessTransport, ProcessWorld, Transport, join_process_group, local_device
from fcp_cli.util.machine import usable_cores

_TRANSFER_REPEATS = 12
_STEP_REPEATS = 5
# On accelerators, an observation consists of several back-to-back runs within a time limit.
_MOST_RUNS = 5
_RUNS_SECONDS = 2.0
_VARIABLES = ("CUDA_DEVICE_MAX", "HCCL_", "NCCL_", "OMP_", "PYTORCH_", "TASK_QUEUE", "TORCH_NCCL_")
_Measure: TypeAlias = Callable[[Callable[[], None], int], list[float]]
_VISION_BUDGET_SHARE = 0.4  # of the time budget, for vision-language models


def main(argv: list[str]) -> None:
    """Run a request; called by torchrun on every rank."""
    request = read_measurement(Path(argv[0]))
    device = torch.device("cpu") if request.device == "cpu" else local_device()
    if device.type == "cpu":
        torch.set_num_threads(1)  # one core per rank, as in the bundled trainer
    owns = join_process_group(device)
    try:
        Measurer(request, device).run()
    finally:
        if owns:
            dist.destroy_process_group()


class Measurer:
    """A rank's part of a measurement."""

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
        recipe = request.recipe
        self.workload = Workload(
            build_model(self.spec, max(request.layers), device, recipe), device, recipe, self.transport
        )
        self.device_bytes = device_memory_bytes(device, ranks_on_host=self.ranks_per_node)
        self.footprint = Footprint(
            spec=self.spec,
            recipe=recipe,
            layers=max(request.layers),
            vision_layers=max(request.vision_layers, default=0),
            ranks=self.world.size,
            on_cpu=device.type == "cpu",
            device_bytes=self.device_bytes,
        )
        asked, asked_calls = request.points(), request.vision_points()
        self.points = self.footprint.fitting(asked)
        self.schedule = Schedule(self.points, request.layers)
        calls = self.footprint.fitting_calls(asked_calls)
        self.vision_schedule = Schedule(calls, request.vision_layers)
        self.vision: VisionWorkload | None = None
        if asked_calls:
            encoder = build_encoder(self.spec, max(request.vision_layers), device, recipe)
            self.vision = VisionWorkload(encoder, device, recipe)
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
        self._prefer_kernels()
        self._warm_up()
        self._clocks("before")
        for_vision = _VISION_BUDGET_SHARE if self.vision else 0.0
        self._observations(self.schedule, self._observe, (1 - for_vision) * self.request.budget_seconds)
        if self.vision:
            self._observations(self.vision_schedule, self._observe_vision, for_vision * self.request.budget_seconds)
        self._clocks("after")
        self._hosts()
        self._memory()
        if self.vision and max(self.request.layers) == self.spec.num_layers:
            self._vision_memory(self.vision)
        self._step()
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
            "dtype": str(self.workload.dtype).removeprefix("torch."),
            "variables": job_variables(),
            "threads_per_rank": torch.get_num_threads() if self.device.type == "cpu" else None,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "system": platform.platform(terse=True),
        }

    def _transfers(self) -> None:
        """Time first contacts, then messages of growing size, in and between nodes."""
        messenger = Messenger(self.transport, self.device, self.stopwatch)
        for link in fresh_links(self.world.size, self.ranks_per_node):
            seconds, device_bytes = messenger.first_contact(link)
            self._write(kind="first_contact", tier=link.tier, seconds=seconds, bytes=device_bytes)
        sizes = message_sizes(self._of_first(most_message_bytes(self.device)))
        for link in links(self.world.size, self.ranks_per_node):
            for num_bytes in sizes:
                seconds = messenger.seconds(link, num_bytes, repeats=_TRANSFER_REPEATS)
                self._write(kind="transfer", tier=link.tier, bytes=num_bytes, seconds=seconds)

    def _prefer_kernels(self) -> None:
        """Time attention kernels on rank 0; then use the fastest for each shape in all packs."""
        if self.device.type != "cuda" or self.workload.dtype not in (torch.bfloat16, torch.float16):
            return
        told: list[KernelTable | None] = [self._kernel_table() if self.is_first else None]
        dist.broadcast_object_list(told, device=torch.device("cpu"))
        if told[0] is not None:
            prefer(Preference(table=told[0]))

    def _kernel_table(self) -> KernelTable | None:
        """Return the kernel table of an earlier run on the same device, or a new one; None if no kernel ran."""
        spec, name = self.spec, device_name(self.device)
        known = read_samples(self.request.samples).kernel_table()
        if known is not None and (known.device, known.release) == (name, torch.__version__):
            return known
        kind = max((kind for kind in spec.kinds if kind.attends), key=spec.query_size)
        heads, key_heads, size = spec.num_heads, spec.heads(kind).num_kv_heads, spec.heads(kind).head_dim
        signature = Signature(heads, key_heads, size, spec.value_dim(kind), self.workload.dtype)
        timings = time_kernels(self.device, signature, self.request.max_length)
        if not timings:
            return None
        table = KernelTable(
            device=name,
            release=torch.__version__,
            heads=(heads, key_heads, size),
            layers=spec.num_layers,
            timings=tuple(timings),
        )
        table = replace(table, kernel=next(iter(table.quickest())))
        self._write(kind="attention_kernels", table=table.document())
        return table

    def _clocks(self, when: str) -> None:
        """Record the clocks of all ranks, if reported, since boost clocks do not last."""
        mine = sm_clock_mhz(self.device)
        everyone = [value for (value,) in gathered([-1.0 if mine is None else mine])]
        if min(everyone) >= 0:
            self._write(kind="clocks", when=when, sm_mhz=everyone)

    def _warm_up(self) -> None:
        """Run each kind of group twice: a kernel's first call compiles and allocates."""
        cheapest_of: dict[tuple[int, int], Point] = {}  # points come cheapest first
        for point in self.points:
            cheapest_of.setdefault((point.degree, point.heads_degree), point)
        for cheapest in cheapest_of.values():
            for _ in range(2):
                self._observe(Task(point=cheapest, layers=max(self.request.layers)))
        for task in self.vision_schedule.tasks[:2]:
            self._observe_vision(task)

    def _hosts(self) -> None:
        """Time how long hosts take to issue the cheapest pack of each degree; CPU ranks are their own hosts."""
        if self.device.type == "cpu" or self.request.emulate:
            return
        cheapest = {point.degree: point for point in reversed(self.points) if point.heads_degree == 1}
        for point, layers in product(cheapest.values(), self.request.layers):
            seconds = self._observe(Task(point=point, layers=layers), _MOST_RUNS, self.stopwatch.issue_each)
            self._write(kind="host", point=point.key, layers=layers, seconds=seconds)

    def _observations(
        self, schedule: Schedule[P], observe: Callable[[Task[P], int], list[float]], budget_seconds: float
    ) -> None:
        deadline = time.monotonic() + budget_seconds
        while (chosen := self._agree_on_next(schedule, deadline)) is not None:
            position, runs = chosen
            task = schedule.tasks[position]
            seconds = observe(task, runs)
            schedule.add(position, seconds)
            self._write(kind="observation", point=task.point.key, layers=task.layers, seconds=seconds)

    def _agree_on_next(self, schedule: Schedule[P], deadline: float) -> tuple[int, int] | None:
        """Return rank 0's choice of the next task and its number of runs; None at the end."""
        # If torchrun was killed, nothing else would end its ranks.
        if os.getppid() != self.launcher:
            raise SystemExit("the launcher is gone")
        position = schedule.next(deadline - time.monotonic()) if self.is_first else None
        runs = 1
        if position is not None and self.device.type != "cpu":
            seconds = schedule.estimate(position)
            runs = _MOST_RUNS if seconds == 0 else max(1, min(_MOST_RUNS, int(_RUNS_SECONDS / seconds)))
        chosen = self._of_first(-1 if position is None else position)
        return None if chosen < 0 else (chosen, self._of_first(runs))

    def _observe(self, task: Task[Point], runs: int = 1, measure: _Measure | None = None) -> list[float]:
        """Return the times of each group that ran the point, run by run, from its least disturbed member.

        Members end together, so the member that arrived last shows the work, and the others include waiting. If ranks
        share cores, the time is from the first start to the last end, and spare ranks run the pack, too, so that no
        core is idle.
        """
        self.workload.set_layers(task.layers)
        measure = measure or self.stopwatch.measure_each
        if self.request.emulate:
            # First and last member: the layout gives them the longest and shortest chunks.
            lengths, members = task.point.lengths, range(task.point.degree)
            works = [self.workload.microbatch(lengths, members, index) for index in {members[0], members[-1]}]
            return [max(times) for times in zip(*(measure(work, runs) for work in works), strict=True)]
        groups = groups_of(task.point, world=self.world.size, ranks_per_node=self.ranks_per_node)
        left_over = tuple(sorted(set(range(self.world.size)).difference(*groups))) if self.shares_cores else ()
        mine = next((group for group in (*groups, left_over) if self.world.rank in group), None)
        work = None
        if mine is not None:
            shared = task.point.heads_degree if len(mine) == task.point.degree else 1
            work = self.workload.microbatch(task.point.lengths, mine, mine.index(self.world.rank), shared)
        dist.barrier()
        everyone = gathered(measure(work, runs) if work else [0.0] * runs)
        if self.shares_cores:
            return [max(everyone[rank][run] for group in groups for rank in group) for run in range(runs)]
        return [min(everyone[rank][run] for rank in group) for group in groups for run in range(runs)]

    def _observe_vision(self, task: Task[VisionPoint], runs: int = 1) -> list[float]:
        """Return the times of all ranks, which run the same parts: encoders do not wait for each other."""
        assert self.vision is not None
        self.vision.set_blocks(task.layers)
        work = self.vision.call(task.point)
        dist.barrier()
        everyone = gathered(self.stopwatch.measure_each(work, runs))
        if self.shares_cores:
            return [max(times) for times in zip(*everyone, strict=True)]
        return [seconds for times in everyone for seconds in times]

    def _step(self) -> None:
        """Time a step outside its micro-batches: gradient reduction, clipping, and AdamW.

        The optimizer has a job rank's share of parameters, limited by memory.
        """
        recipe, size = self.request.recipe, self.world.size
        share = self.footprint.optimizer_share(recipe.shards(size) if recipe.zero_stage else 1)
        step = UpdateStep(self.workload, self.world, share=share)
        seconds = []
        for _ in range(_STEP_REPEATS):
            dist.barrier()
            everyone = [row[0] for row in gathered([self.stopwatch.measure(step.run)])]
            seconds.append(max(everyone) if self.shares_cores else min(everyone))
        self._write(
            kind="step",
            layers=max(self.request.layers),
            seconds=seconds,
            state_bytes=state_bytes(step.optimizer),
            optimizer_share=share,
        )

    def _memory(self) -> None:
        """Record peak memory of growing packs on one rank, up to the longest observed at degree 1."""
        observed = [
            task.point.lengths[0]
            for task, seconds in zip(self.schedule.tasks, self.schedule.seconds, strict=True)
            if seconds and task.point.degree == 1 and len(task.point.lengths) == 1
        ]
        longest = self._of_first(max(observed, default=512))
        for layers in self.request.layers:
            self.workload.set_layers(layers)
            for tokens in (longest // 4, longest // 2, longest):
                work = self.workload.microbatch((tokens,), (self.world.rank,), 0)
                self._peak(work, kind="memory", tokens=tokens, layers=layers)

    def _vision_memory(self, vision: VisionWorkload) -> None:
        """Record peak memory of growing numbers of equal parts, up to the largest observed call."""
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
        """Record by how much `work` raises this rank's peak memory."""
        # Return freed memory to the system first: a CPU's peak is the resident size, not memory in use.
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        reset_peak(self.device)
        before = peak_bytes(self.device)
        work()
        after = peak_bytes(self.device)
        if before is not None and after is not None:
            self._write(**line, peak_bytes=after - before)

    def _of_first(self, value: int) -> int:
        """Broadcast rank 0's value."""
        shared = torch.tensor([value], dtype=torch.int64)
        self.world.broadcast(shared)
        return int(shared)


def job_variables() -> dict[str, str]:
    """Return this process's variables that configure back ends, allocators and threads."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
