"""Online planning on one rank: consumes batches of a stream and yields planned steps, the same on all ranks.

There are three threads: one reads the stream, one has batches planned and agrees on them with the other ranks, and the
training loop takes steps. The first two run ahead of the loop by a bounded number of steps from the step it requests.
All ranks request the same steps, so they exchange equally many messages, and a rank that leaves its loop leaves none
waiting.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.file import steps_bytes, steps_of, table_bytes
from fcp_cli.plan.metadata import OnlineSettings, read_online_settings
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.cursor import RankMicroBatches, RankView, ShardT, note_follower
from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.metrics import Recorder
from fcp_cli.runtime.planner_process import ReadBatch, StreamProcess, read_batches, row_of
from fcp_cli.runtime.rank_job import RankJob
from fcp_cli.util.arrays import IntArray

STEPS, END, _FAULT, _LEFT = range(4)  # a rank's state for the next steps
_LEAVING_SECONDS: Final = 10.0  # that a rank waits for its planning thread when it leaves the loop
_LOOK_SECONDS: Final = 0.05


class StreamSource:
    """Steps of a stream, planned a few ahead of the training loop.

    Args:
        stream: sequences; see `item_of`.
        settings: settings of the plan and the search.
        path: path of the plan to write.
        control: messages between ranks.
        fetch: function from an id or row to the loader's item; None if rows are the items.

    Attributes:
        is_planned: whether the first step is planned before the loop asks for it.
        lengths: [rows] tokens of the manifest's rows, or None.
        followed: steps that the loop has requested, oldest first; only the metrics recorder removes them.
        measured: on rank 0, the measured steps of all ranks.
        is_stopped: whether the loop is ended early, so that the next run continues the plan.
    """

    is_planned = False
    lengths: IntArray | None = None

    def __init__(
        self, stream: Iterable[Any], settings: OnlineSettings, path: Path, control: Control, fetch: Fetch | None
    ) -> None:
        self.settings, self.path, self._control, self._fetch = settings, path, control, fetch
        self.followed: deque[StepPlan] = deque(maxlen=64)
        self.measured = Measured()
        self.is_stopped = False
        self._stream = stream
        self._process: Any = None  # a PlanningProcess, on rank 0
        self._planned: queue.SimpleQueue[StepPlan | BaseException | None] = queue.SimpleQueue()
        self._batches: queue.SimpleQueue[ReadBatch | BaseException | None] = queue.SimpleQueue()
        self._given: dict[int, tuple[Any, bool]] = {}  # sequence -> (id or row, is_row)
        self._wanted = -1  # last step that may be planned
        self._changed = threading.Condition()
        self._is_left = False
        self._handed: deque[StepPlan] = deque()
        self._threads: list[threading.Thread] = []
        self._reads: Callable[[], None] | None = None

    @property
    def looks_ahead(self) -> bool:
        """Return whether a step may be loaded before the previous one is trained."""
        return self.settings.options.ahead > 0

    def fetch_by(self, given: Fetch | None) -> Fetch | None:
        """Return the function from a sequence to the loader's item, for a session's own `fetch`."""
        return self.fetch

    def connect(self, job: RankJob) -> None:
        """Open no connections: rings are not known yet, and `StreamCursor` opens theirs before each step."""

    def report_to(self, recorder: Recorder) -> None:
        """Let a recorder read the trained steps from memory, and refits read its records."""
        recorder.followed = self.followed
        if self.measured.note not in recorder.listeners:
            recorder.listeners.append(self.measured.note)

    def cursor(self, job: RankJob, first_step: int, *, ahead: int) -> StreamCursor:
        """Return this rank's micro-batches from a step on, which may have to be planned first."""
        return StreamCursor(self, job, first_step=first_step)

    def open(self, first_step: int) -> None:
        """Start at a step; every rank calls it with the same one."""
        self._agree_on_settings()
        opened = on_rank_0(self._control, lambda: self._begin_process(first_step))
        self._refits = Refits(self.settings.options.refit_every, opened, first_step)
        self._adopt(self._refits.in_force(first_step))
        note_follower(self.path)
        self._first_step = first_step
        self._reads = self._begin_reading(first_step, opened)
        if self._control.rank == 0 and self._reads is not None:
            self._start(self._reads, "fcp-stream")
        self._start(self._agree, "fcp-planner")
        self.want(first_step)

    def want(self, step: int) -> None:
        """Allow planning of steps up to `ahead` after this one."""
        with self._changed:
            self._wanted = max(self._wanted, step + self.settings.options.ahead)
            self._changed.notify_all()

    def steps(self) -> Iterator[StepPlan]:
        """Yield the steps as they are planned."""
        while (found := self._planned.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            self._handed.append(found)
            yield found

    def rows_ahead(self) -> Iterator[int | None]:
        """Yield the manifest rows that this rank needs, in order; None if the next one is not planned yet."""
        raise RunError("a PlanSampler reads rows of a manifest, which a stream lacks; pass fetch=...")

    def fetch(self, sequence: int) -> Any:
        """Return the loader's item of a sequence, whose step is planned but not yet trained."""
        given, is_row = self._given[sequence]
        if self._fetch is not None:
            return self._fetch(given)
        if not is_row:
            raise RunError("no data: pass fetch=..., a function from an id of the stream to tokens")
        return row_of(given)

    def hand_out(self, step: int) -> StepPlan:
        """Return the plan of the step that the loop trains next, and drop the sequences of earlier steps."""
        while self._handed[0].step < step:
            for sequence in self._handed.popleft().sequences.tolist():
                self._given.pop(sequence, None)
        self.followed.append(self._handed[0])
        return self._handed[0]

    @property
    def current(self) -> StepPlan:
        """Return the plan of the current step."""
        return self._handed[0]

    def close(self, end_step: int) -> None:
        """Leave the loop before `end_step`; rank 0 writes the plan of the trained steps."""
        with self._changed:
            if self._is_left:
                return
            self._is_left = True
            self._changed.notify_all()
        self._planned.put(None)
        for thread in self._threads:
            if thread.name == "fcp-planner":
                thread.join(_LEAVING_SECONDS)
        if self._process is None:
            return
        try:
            self._process.close(end_step, is_stopped=self.is_stopped)
        except FcpError as error:
            print(f"fcp: {error}; 'fcp plan --resume -o {self.path}' makes the plan", file=sys.stderr, flush=True)

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _agree_on_settings(self) -> None:
        digest = hashlib.blake2b(self.settings.to_json().encode(), digest_size=8).digest()
        told = self._control.table([int.from_bytes(digest, "little") >> 1])[:, 0]
        others = [rank for rank, word in enumerate(told.tolist()) if word != told[0]]
        if others:
            raise RunError(f"rank {others[0]} plans for something else than rank 0: give every rank the same planner")
        if self.settings.metadata.num_ranks != self._control.size:
            raise RunError(
                f"the planner is for {self.settings.metadata.num_ranks} ranks but {self._control.size} were launched; "
                f"launch as many, or plan for them: Planner(..., ranks={self._control.size})"
            )

    def _begin_process(self, first_step: int) -> dict[str, Any]:
        self._process = StreamProcess(self.settings, self.path, first_step)
        return dict(self._process.opened)

    def _is_allowed(self, step: int) -> bool:
        """Wait until this step may be planned; return False if the loop is left before."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted >= step or self._is_left)
            return self._wanted >= step

    def _begin_reading(self, first_step: int, opened: Mapping[str, Any]) -> Callable[[], None] | None:
        """Return a function that reads the stream, to run in a thread; None if there is nothing to read."""
        over = self.settings.options.stream_begins == "over"
        step, sequence = (0, 0) if over else (first_step, int(opened["first_sequence"]))

        def read() -> None:
            try:
                batches = read_batches(self._stream, self.settings, step=step, sequence=sequence)
                due = step
                while self._is_allowed(max(due, first_step)):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    due = batch.step + 1
                    self._batches.put(batch)
                self._batches.put(None)
            except BaseException as error:  # of any kind, or the job would wait for the stream forever
                self._batches.put(error)

        return read

    def _agree(self) -> None:
        """Plan step after step on all ranks, until the stream ends or a rank fails."""
        due = self._first_step
        try:
            while self._is_allowed(due):
                self._refit(due)
                steps = self._next_steps(due)
                if steps is None:
                    break
                for step in steps:
                    self._planned.put(step)
                due = steps[-1].step + 1
            if due == 0 and not self._is_left:
                raise RunError("the stream ended before its first sequence; a run needs a step to train")
            self._planned.put(None)
        except BaseException as error:
            self._planned.put(error)

    def _refit(self, due: int) -> None:
        """Refit the cost profile, or repeat an earlier run's refit at this step. Every rank calls it."""
        if self._refits.is_due(due):
            told = on_rank_0(self._control, lambda: self._measured_refit(due))
            self._refits.note(due, told["refit"])
        self._adopt(self._refits.begins_with(due))

    def _measured_refit(self, due: int) -> dict[str, Any]:
        assert self._process is not None
        told = self._process.refit(due, self.measured.take())
        print(f"fcp: step {due}: {told['line']}", file=sys.stderr, flush=True)
        return {"refit": told["refit"]}

    def _adopt(self, refit: Mapping[str, Any] | None) -> None:
        if refit is not None and self._process is not None:
            self._process.adopt(refit)

    def _next_steps(self, due: int) -> list[StepPlan] | None:
        """Return the next planned steps, or None if the stream has ended or the loop was left. Every rank calls it."""
        told = self._plan_steps(due) if self._control.rank == 0 else b""
        head, _, table = self._control.from_rank(0, told).partition(b"\n")
        facts = json.loads(head)
        state, fault = int(facts["state"]), str(facts.get("fault", ""))
        steps = steps_of(table) if state == STEPS else []
        if state in (STEPS, END):
            try:
                self._note_given(facts, steps, due)
            except Exception as error:
                state, fault = _FAULT, _line(error)
        states = self._control.table([state])[:, 0].tolist()
        if _FAULT in states:
            raise RunError(self._control.from_rank(states.index(_FAULT), fault.encode()).decode())
        return steps if state == STEPS and _LEFT not in states else None

    def _plan_steps(self, due: int) -> bytes:
        """Return a message with the next planned steps, or with the reason why there are none."""
        assert self._process is not None
        try:
            batch = self._take_batch()
            while batch is not None and batch.step < self._first_step:
                self._process.compare(batch)
                batch = self._take_batch()
            if batch is None:
                return joined_message({"state": _LEFT if self._is_left else END})
            steps = self._process.plan(batch)
        except Exception as error:
            return joined_message({"state": _FAULT, "fault": _line(error)})
        items = batch.items
        for place, item in enumerate(items):
            self._given[batch.first_sequence + place] = (item.given, item.is_row)
        ids = None if items and items[0].is_row else [item.given for item in items]
        facts = {"state": STEPS, "ids": ids, "first_sequence": batch.first_sequence}
        return joined_message(facts, steps_bytes(steps))

    def _take_batch(self) -> ReadBatch | None:
        """Return the next batch, or None if the stream has ended or the loop is left first."""
        while True:
            try:
                found = self._batches.get(timeout=_LOOK_SECONDS if self._is_left else 0.5)
            except queue.Empty:
                if self._is_left:
                    return None
                continue
            if isinstance(found, BaseException):
                raise found
            return found

    def _note_given(self, facts: Mapping[str, Any], steps: list[StepPlan], due: int) -> None:
        """Record the sequences of the steps. Ranks that do not plan read their own rows, and compare their lengths."""
        if self._control.rank == 0:
            return
        if facts.get("ids") is not None:
            for place, given in enumerate(facts["ids"]):
                self._given[facts["first_sequence"] + place] = (given, False)
            return
        if not steps and self._reads is not None:  # the stream has ids, or ended before any row
            return
        if self._reads is not None:
            self._start(self._reads, "fcp-stream")
            self._reads = None
        batch = self._take_batch()
        while batch is not None and batch.step < self._first_step:
            batch = self._take_batch()
        if (batch is None) != (not steps) and not self._is_left:
            ends, goes_on = (self._control.rank, 0) if batch is None else (0, self._control.rank)
            raise RunError(f"the stream of rank {ends} ends before step {due}, that of rank {goes_on} goes on; {_SAME}")
        if batch is None:
            return
        lengths = {
            int(row): int(length) for step in steps for row, length in zip(step.sequences, step.lengths, strict=True)
        }
        for place, item in enumerate(batch.items):
            number = batch.first_sequence + place
            if lengths.get(number) != item.length:
                raise RunError(
                    f"sequence {number} of the stream of rank {self._control.rank} has {item.length} tokens, where the "
                    f"plan has {lengths.get(number, 'none')}; {_SAME}"
                )
            self._given[number] = (item.given, item.is_row)


_SAME: Final = "give every rank the same stream: the same data, seed and order"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, FcpError) else f"the stream failed: {type(error).__name__}: {text}"


def joined_message(facts: dict[str, Any], table: bytes = b"") -> bytes:
    """Return rank 0's message about the next steps: a line of facts, then a table of steps."""
    return json.dumps(facts).encode() + b"\n" + table


# Messages between ranks for online planning: on a separate group, in host memory.

_PATIENCE = timedelta(days=7)  # data may take long to arrive, which is not a hang


class Control(Protocol):
    """All ranks of a job, for online planning. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def from_rank(self, rank: int, message: bytes) -> bytes:
        """Broadcast the message of one rank."""
        ...

    def table(self, words: list[int]) -> IntArray:
        """All-gather words, equally many from each rank: [ranks, words]."""
        ...


class ProcessControl:
    """Ranks as processes of torch.distributed. Every rank creates it, in the same order as other groups."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE, group_desc="planning")

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def table(self, words: list[int]) -> IntArray:
        told = torch.zeros((self.size, len(words)), dtype=torch.int64, device="cpu")
        told[self.rank] = torch.tensor(words, dtype=torch.int64, device="cpu")
        dist.all_reduce(told, group=self._group)
        return told.numpy()

    def from_rank(self, rank: int, message: bytes) -> bytes:
        size = torch.tensor([len(message)], dtype=torch.int64, device="cpu")
        dist.broadcast(size, rank, group=self._group)
        content = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
        if self.rank == rank:
            content.copy_(torch.from_numpy(np.frombuffer(message, dtype=np.uint8).copy()))
        dist.broadcast(content, rank, group=self._group)
        return content.numpy().tobytes()


def on_rank_0(control: Control, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a function on rank 0; return its result, or raise its error, on all ranks. Every rank calls it."""
    told: dict[str, Any] = {}
    if control.rank == 0:
        try:
            told = {"found": run()}
        except FcpError as error:
            told = {"error": str(error)}
    told = json.loads(control.from_rank(0, json.dumps(told).encode()))
    if "error" in told:
        raise RunError(told["error"])
    found: dict[str, Any] = told["found"]
    return found


# Settings of a stream, and its steps from one rank's view.

ONLINE_VARIABLE: Final = "FCP_ONLINE"
_PLAN: Final = "plan.parquet"


class PlansStreams(Protocol):
    """Planner with settings for streams: a `fcp_cli.Planner`."""

    def online(self) -> OnlineSettings: ...


def online_settings(planner: PlansStreams | OnlineSettings | None) -> OnlineSettings:
    """Return the planning settings of a stream: those of the planner, else of `fcp launch --online`."""
    if isinstance(planner, OnlineSettings):
        return planner
    if planner is not None:
        return planner.online()
    path = os.environ.get(ONLINE_VARIABLE)
    if not path:
        raise RunError(
            "a stream needs a planner: pass planner=Planner(...), or start the script with 'fcp launch --online'"
        )
    return read_online_settings(Path(path))


def stream_plan_path(given: str | Path | None) -> Path:
    """Return the path of a stream's plan: the given one, else FCP_PLAN, else `plan.parquet` in the current folder."""
    return Path(given or os.environ.get("FCP_PLAN") or _PLAN)


class StreamCursor:
    """This rank's micro-batches of a stream, step by step; has the interface of `PlanCursor`.

    Args:
        source: planner of the steps; opened here.
        job: the rank, whose `next_step` is the step after the last trained one.
        first_step: optimizer step to start at.
    """

    def __init__(self, source: StreamSource, job: RankJob, *, first_step: int) -> None:
        self._source, self._job = source, job
        self._view = RankView(path=source.path, metadata=source.settings.metadata, rank=job.rank)
        job.next_step = first_step
        source.open(first_step)
        self._steps = source.steps()

    def first(self) -> Iterator[StepPlan]:
        """Yield the first step without consuming it; nothing if the stream is empty."""
        step = next(self._steps, None)
        if step is not None:
            self._steps = chain([step], self._steps)
            yield step

    def __iter__(self) -> Iterator[RankMicroBatches[Any]]:
        return map(self._view.of_step, self._steps)

    def taken(self, loaded: Iterator[RankMicroBatches[ShardT]]) -> Iterator[RankMicroBatches[ShardT]]:
        """Yield the loaded micro-batches of each step; let further steps be planned, and connect to new neighbours."""
        while True:
            self._source.want(self._job.next_step)
            own = next(loaded, None)
            if own is None:
                return
            plan = self._source.hand_out(own.step)
            self._job.connections.open_for(plan, self._job.metadata.ranks_per_node)
            yield own

    def close(self) -> None:
        """Leave the stream; writes the trained steps as a plan."""
        self._source.close(self._job.next_step)


# Measured steps of a stream on rank 0, collected for the next refit.


class Measured:
    """Timings of micro-batches in steps that all ranks have trained; added by the loop, taken by the planner."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, float]] = []
        self._seconds: list[float] = []  # of each step
        self._lock = threading.Lock()

    def note(self, record: Mapping[str, Any]) -> None:
        """Add a record of the metrics; warm-up steps are skipped."""
        if record.get("kind") != "step" or record.get("warm_up"):
            return
        rows = [
            (record["step"], timing["order"], rank["rank"], timing["seconds"])
            for rank in record["ranks"]
            for timing in rank["micro_batches"]
        ]
        with self._lock:
            self._rows += rows
            self._seconds.append(record["seconds"])

    def has(self, *, seconds: float, steps: int, micro_batches: int) -> bool:
        """Return whether measurements since the last `take` suffice: by micro-batches, and by seconds or steps."""
        with self._lock:
            is_long = sum(self._seconds) >= seconds or len(self._seconds) >= steps
            return is_long and len({row[:2] for row in self._rows}) >= micro_batches

    def take(self) -> bytes:
        """Return the table of measurements since the last call: step, order, rank, seconds."""
        with self._lock:
            rows, self._rows, self._seconds = self._rows, [], []
        names = ("step", "order", "rank", "seconds")
        columns = list(zip(*rows, strict=True)) or [()] * len(names)
        types = (pa.int64(), pa.int64(), pa.int64(), pa.float64())
        return table_bytes(
            pa.table({name: pa.array(column, kind) for name, column, kind in zip(names, columns, types, strict=True)})
        )


class Refits:
    """Schedule of a stream's refits; the same on all ranks.

    Args:
        every: steps between refits of the cost profile, or None for no new refits.
        opened: first message of rank 0's planner process: under `refits` those of its journal, and under `planned_to`
            the step up to which the journal has plans; no refit is due before it.
        begins: first step to plan.
    """

    def __init__(self, every: int | None, opened: Mapping[str, Any], begins: int) -> None:
        self._every, self._settled_to = every, max(begins + 1, int(opened["planned_to"]))
        recorded: Sequence[Mapping[str, Any]] = opened["refits"]
        self._known = {int(refit["first_step"]): refit for refit in recorded}
        self._last = begins

    def is_due(self, step: int) -> bool:
        """Return whether a refit is due at this step."""
        if self._every is None or step < self._settled_to or step // self._every == self._last // self._every:
            return False
        self._last = step
        return True

    def note(self, step: int, refit: Mapping[str, Any] | None) -> None:
        """Record the refit that takes effect at a step; None if there is none."""
        if refit is not None:
            self._known[step] = refit

    def begins_with(self, step: int) -> Mapping[str, Any] | None:
        """Return the refit that takes effect at a step, or None."""
        return self._known.get(step)

    def in_force(self, step: int) -> Mapping[str, Any] | None:
        """Return the latest refit that took effect before a step, or None."""
        before = [first for first in self._known if first < step]
        return self._known[max(before)] if before else None
