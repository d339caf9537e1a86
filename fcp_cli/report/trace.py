"""A plan, a run, or both side by side as a Chrome trace: opens in Perfetto and chrome://tracing.

Events follow the Trace Event Format of Chromium's trace viewer: one process per node, one thread per rank, one
complete event ("X") per micro-batch and rank, and a flow ("s", "t", "f") through the members of each ring. Of a plan of
pipelines there is a thread per stage, with an event per forward and backward.
Times are whole microseconds: a start and a duration rounded apart would let neighbours overlap by a nanosecond, and
Perfetto leaves overlapping events out. Process and thread ids start at 1: Perfetto takes thread 0 for the idle task.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

import numpy as np

from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.report.stage_bars import stage_times
from fcp_cli.runs.metrics.metrics_reader import RunStep

Event = dict[str, Any]
Kind = Literal["planned", "measured"]

_STEPS_PID = 1  # the process whose tracks hold whole steps; nodes follow it
_KINDS: tuple[Kind, ...] = ("planned", "measured")
# Sequences named in the arguments of one event; a pack of thousands would make the file unreadable.
_MOST_SEQUENCES = 256


@dataclass(kw_only=True, slots=True)
class TraceBuilder:
    """Makes the events of one step after the other; steps lie end to end on the time line.

    With both a plan and a run, each step starts at the same time in both, and the next one after the slower of them.

    Attributes:
        num_ranks, ranks_per_node: how many the job has.
        metadata: the metadata of the plan, if there is one; tells of its pipelines.
        clock_seconds: the time at which the next step starts.
    """

    num_ranks: int
    ranks_per_node: int
    metadata: PlanMetadata | None = None
    clock_seconds: float = 0.0
    _flows: int = field(default=0, init=False)

    @property
    def _stages(self) -> int:
        """Return how many tracks a rank has."""
        has_pipelines = self.metadata is not None and self.metadata.pipeline is not None
        return self.metadata.pipeline_parallel if has_pipelines and self.metadata is not None else 1

    def names(self, kinds: Iterable[Kind]) -> Iterator[Event]:
        """Yield metadata events: names and order of processes and threads."""
        yield from _named("process", _STEPS_PID, 1, "steps", 0)
        for kind in kinds:
            yield from _named("thread", **self._track(kind, None), name=kind, index=_KINDS.index(kind))
            for node in range(-(-self.num_ranks // self.ranks_per_node)):
                first = self._track(kind, node * self.ranks_per_node)
                yield from _named("process", **first, name=f"node {node} {kind}", index=first["pid"])
            stages = self._stages if kind == "planned" else 1
            for rank in range(self.num_ranks):
                for stage in range(stages):
                    name = f"rank {rank} stage {stage}" if stages > 1 else f"rank {rank}"
                    yield from _named(
                        "thread", **self._track(kind, rank, stage), name=name, index=rank * stages + stage
                    )

    def step(self, planned: StepPlan | None, measured: RunStep | None) -> Iterator[Event]:
        """Yield the events of one step, planned, measured or both."""
        microbatches = (
            {microbatch.order: microbatch for microbatch in planned.microbatches()} if planned is not None else {}
        )
        lengths = [0.0]
        if planned is not None:
            lengths.append(planned.makespan_seconds)
            figures = {"bound_seconds": planned.bound_seconds, "gap": planned.gap}
            figures["idle_fraction"] = planned.idle_fraction(self.num_ranks)
            yield self._slice("planned", None, f"step {planned.step}", 0.0, planned.makespan_seconds, figures)
            yield from self._planned_microbatches(planned, microbatches.values())
        if measured is not None:
            lengths.append(measured.seconds)
            args = {"predicted_seconds": measured.predicted_seconds, "tokens": measured.tokens, "loss": measured.loss}
            args |= {"idle_fraction": measured.idle_fraction, "warm_up": measured.warm_up}
            yield self._slice("measured", None, f"step {measured.step}", 0.0, measured.seconds, args)
            yield from self._measured_microbatches(measured, microbatches)
        self.clock_seconds += max(lengths)

    def _planned_microbatches(self, planned: StepPlan, microbatches: Iterable[MicroBatch]) -> Iterator[Event]:
        parts = self._parts(planned)
        for microbatch in microbatches:
            if microbatch.is_idle:
                continue
            args = {"step": microbatch.step, **_pack_arguments(microbatch), "predicted_seconds": microbatch.seconds}
            name = _name(microbatch.order, microbatch.described_degree)
            for stage, part, start, seconds in parts(microbatch):
                for rank in microbatch.ranks:
                    yield self._slice("planned", rank, f"{name}{part}", start, seconds, args, stage)
            yield from self._flow("planned", [(rank, microbatch.start_seconds) for rank in microbatch.ranks])

    def _parts(self, planned: StepPlan) -> Callable[[MicroBatch], Iterator[tuple[int, str, float, float]]]:
        """Return a function that yields the parts of a micro-batch: stage, name, start and seconds of each."""
        if self.metadata is None or self.metadata.pipeline is None:
            return lambda microbatch: iter([(0, "", microbatch.start_seconds, microbatch.seconds)])
        times = stage_times(planned, self.metadata, self.metadata.pipeline)
        stages, virtual = self.metadata.pipeline_parallel, self.metadata.virtual_stages

        def parts(microbatch: MicroBatch) -> Iterator[tuple[int, str, float, float]]:
            at = microbatch.order
            for block in range(stages * virtual):
                where = f", block {block // stages}" if virtual > 1 else ""
                begin, seconds = float(times.forward_start[at, block]), float(times.forward_seconds[at, block])
                yield block % stages, f" forward{where}", begin, seconds
                begin, seconds = float(times.backward_start[at, block]), float(times.backward_seconds[at, block])
                yield block % stages, f" backward{where}", begin, seconds

        return parts

    def _measured_microbatches(self, step: RunStep, microbatches: dict[int, MicroBatch]) -> Iterator[Event]:
        for order in np.unique(step.orders).tolist():
            members = np.flatnonzero(step.orders == order)
            for i in members.tolist():
                yield self._measured_slice(step, i, microbatches.get(order))
            if len(members) > 1:
                ranks, starts = step.ranks[members].tolist(), step.start_seconds[members].tolist()
                yield from self._flow("measured", list(zip(ranks, starts, strict=True)))

    def _measured_slice(self, step: RunStep, i: int, microbatch: MicroBatch | None) -> Event:
        order, degree, seconds = int(step.orders[i]), int(step.degrees[i]), float(step.busy_seconds[i])
        args: dict[str, Any] = {"step": step.step, "order": order, "degree": degree, "tokens": int(step.pack_tokens[i])}
        if microbatch is not None:
            args |= _pack_arguments(microbatch)
        args |= {"predicted_seconds": float(step.planned_seconds[i]), "measured_seconds": seconds}
        described = str(degree) if microbatch is None else microbatch.described_degree
        name = _name(order, described) if args["tokens"] else f"{order}: idle"
        return self._slice("measured", int(step.ranks[i]), name, float(step.start_seconds[i]), seconds, args)

    def _slice(
        self,
        kind: Kind,
        rank: int | None,
        name: str,
        start_seconds: float,
        seconds: float,
        args: dict[str, Any],
        stage: int = 0,
    ) -> Event:
        """Return a complete event on a rank's track, or a stage's of it, or on the track of whole steps."""
        begin, end = self._microseconds(start_seconds), self._microseconds(start_seconds + seconds)
        event = {"name": name, "cat": kind, "ph": "X", **self._track(kind, rank, stage)}
        return {**event, "ts": begin, "dur": end - begin, "args": args}

    def _flow(self, kind: Kind, members: list[tuple[int, float]]) -> Iterator[Event]:
        """Yield arrows through the members of a ring, earliest first: an arrow cannot point back in time."""
        if len(members) < 2:
            return
        self._flows += 1
        last = len(members) - 1
        for i, (rank, start) in enumerate(sorted(members, key=lambda member: member[1])):
            event: Event = {"name": "group", "cat": kind, "ph": "s" if i == 0 else "f" if i == last else "t"}
            event |= {"id": self._flows, **self._track(kind, rank), "ts": self._microseconds(start)}
            yield {**event, "bp": "e"} if i == last else event

    def _microseconds(self, seconds: float) -> int:
        return round((self.clock_seconds + seconds) * 1e6)

    def _track(self, kind: Kind, rank: int | None, stage: int = 0) -> dict[str, int]:
        if rank is None:
            return {"pid": _STEPS_PID, "tid": 1 + _KINDS.index(kind)}
        # Planned and measured tracks of one node get ids, and so places, next to each other.
        first_of_node = 1 + _STEPS_PID + len(_KINDS) * (rank // self.ranks_per_node)
        return {"pid": first_of_node + _KINDS.index(kind), "tid": 1 + rank * self._stages + stage}


def _name(order: int, degree: str) -> str:
    return f"{order}: degree {degree}"


def _pack_arguments(microbatch: MicroBatch) -> dict[str, Any]:
    args: dict[str, Any] = {
        "order": microbatch.order,
        "degree": microbatch.degree,
        **({} if microbatch.heads_degree == 1 else {"heads_degree": microbatch.heads_degree}),
        "tokens": microbatch.tokens,
        "ranks": list(microbatch.ranks),
    }
    if microbatch.wave >= 0:
        args["wave"] = microbatch.wave
    args["num_sequences"] = len(microbatch.sequences)
    args["sequences"] = list(microbatch.sequences[:_MOST_SEQUENCES])
    args["lengths"] = list(microbatch.lengths[:_MOST_SEQUENCES])
    return args


def _named(kind: Literal["process", "thread"], pid: int, tid: int, name: str, index: int) -> Iterator[Event]:
    event = {"ph": "M", "pid": pid, "tid": tid}
    yield {"name": f"{kind}_name", **event, "args": {"name": name}}
    yield {"name": f"{kind}_sort_index", **event, "args": {"sort_index": index}}


def write_trace(file: TextIO, events: Iterable[Event], *, source: dict[str, Any]) -> int:
    """Write events as they come, in the JSON object form of the format, and return how many there were.

    Args:
        file: text, open for writing.
        events: the events for example of `TraceBuilder`.
        source: the source of the trace; viewers show it under "metadata".
    """
    file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(source) + ',"traceEvents":[')
    count = 0
    for event in events:
        file.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":"), allow_nan=False))
        count += 1
    file.write("\n]}\n")
    return count
