"""Follow a plan file from one rank's view: its micro-batches of each step, read ahead. Imports no torch."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PLANNED_BY_ITSELF, PlanMetadata, has_no_plan
from fcp_cli.plan.rings import ring_order
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.runtime.layout import RingMember
from fcp_cli.util.arrays import IntArray

_STEPS_AHEAD = 4

T = TypeVar("T")
ShardT = TypeVar("ShardT")


@dataclass(kw_only=True, slots=True, eq=False)
class RankMicroBatches(Generic[ShardT]):
    """One rank's micro-batches of one planned step, which its loop runs once, in order and to the end.

    Attributes:
        step: optimizer step.
        rows: the micro-batches in the step's global order, with ranks in ring order; at least one, which may be idle.
        makespan_seconds, bound_seconds: predicted duration and lower bound of the whole step.
        loss_tokens: number of tokens with a loss in the global batch: all but the last token of each sequence.
        sequences: number of sequences of the global batch.
        waves: for each of `rows`, all micro-batches of its wave if their ranks balance the encoder's work; else empty.
        shards: for each of `rows`, this rank's shard; empty until they are loaded.
        num_run: number of micro-batches that were run.
        is_begun, is_finished: whether the loop has begun with them, and has run them and ended the step.
    """

    step: int
    rows: tuple[MicroBatch, ...]
    makespan_seconds: float
    bound_seconds: float
    loss_tokens: int
    sequences: int
    waves: tuple[tuple[MicroBatch, ...], ...] = ()
    shards: tuple[ShardT, ...] = ()
    num_run: int = 0
    is_begun: bool = False
    is_finished: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def begin(self) -> None:
        """Record that the loop begins with them; raise RunError at the second time."""
        if self.is_begun:
            raise RunError(f"step {self.step} was iterated twice; each of its micro-batches runs once")
        self.is_begun = True

    def require_finished(self) -> None:
        """Raise RunError unless every micro-batch was run."""
        if not self.is_begun:
            raise RunError(
                f"step {self.step}: the next step was fetched before any of its {len(self)} micro-batches was run, as "
                "loaders do that fetch ahead (a DataLoader; Lightning's Trainer, unless the loader has a length: see "
                "fcp_cli.integrations.lightning.PlannedSteps); iterate each step to its end before the next"
            )
        if not self.is_finished:
            raise RunError(
                f"step {self.step}: {self.num_run} of {len(self)} micro-batches were run; iterate each step to its end"
            )

    def require_attention(self, row: MicroBatch, ring: RingMember, remedy: str) -> None:
        """Raise RunError if a micro-batch that needs `attention` never called it.

        A model's own attention would attend across the sequences of a pack, and not across shards.
        """
        shares = row.degree > 1 or len(row.sequences) > 1
        if shares and not ring.attention_calls:
            raise RunError(
                f"step {self.step}, micro-batch {row.order}, degree {row.degree}, {len(row.sequences)} sequences: "
                f"{remedy}"
            )


def orders_of_rank(plan: StepPlan, rank: int) -> IntArray:
    """Return the indices of the micro-batches that include a rank, in the step's order."""
    # `ranks` concatenates all rows: an entry belongs to the last row that starts at or before it.
    orders: IntArray = np.searchsorted(plan.rank_offsets, np.flatnonzero(plan.ranks == rank), side="right") - 1
    return orders


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """Converts planned steps to one rank's view.

    Attributes:
        path, metadata: path and metadata of the plan.
        rank: global rank.
        ascending: keep the ranks of groups ascending, as in torch's process groups, instead of in ring order.
    """

    path: Path
    metadata: PlanMetadata
    rank: int
    ascending: bool = False

    def of_step(self, plan: StepPlan) -> RankMicroBatches[Any]:
        """Return the rank's micro-batches of a planned step; raise RunError if there are none."""
        rows = orders_of_rank(plan, self.rank)
        if not len(rows):
            raise RunError(
                f"{self.path}: step {plan.step} has no micro-batch for rank {self.rank}; see 'fcp check {self.path}'"
            )
        return RankMicroBatches(
            step=plan.step,
            rows=tuple(self._row(plan, int(i)) for i in rows),
            makespan_seconds=plan.makespan_seconds,
            bound_seconds=plan.bound_seconds,
            loss_tokens=int(plan.lengths.sum(dtype=np.int64)) - len(plan.lengths),
            sequences=len(plan.lengths),
            waves=self._waves(plan, rows),
        )

    def _waves(self, plan: StepPlan, rows: IntArray) -> tuple[tuple[MicroBatch, ...], ...]:
        if self.metadata.encoder_balance is None:
            return ()
        wanted = plan.wave[rows]
        return tuple(tuple(self._row(plan, i) for i in np.flatnonzero(plan.wave == wave).tolist()) for wave in wanted)

    def _row(self, plan: StepPlan, order: int) -> MicroBatch:
        row = plan.microbatch(order)
        if self.ascending:
            return row
        return replace(row, ranks=ring_order(row.ranks, self.metadata.ranks_per_node, row.heads_degree))


class PlanCursor:
    """Iterator over this rank's steps from `first_step` on, read ahead in a background thread.

    Memory does not grow with the plan: it holds one row group of the file and a few steps.

    Args:
        path: a plan file.
        rank: global rank.
        first_step: optimizer step to start at, for a resumed run.
        ahead: number of steps to read ahead; 0 reads in the calling thread.
        ascending: see `RankView`; for rings that run in a process group.
    """

    def __init__(
        self, path: Path, rank: int, *, first_step: int = 0, ahead: int = _STEPS_AHEAD, ascending: bool = False
    ) -> None:
        self._reader = PlanReader(path)
        self._view = RankView(path=path, metadata=self._reader.metadata, rank=rank, ascending=ascending)
        note_follower(path)
        self._path, self._first_step = path, first_step
        if first_step < self.metadata.first_step:
            raise RunError(
                f"step {first_step} is not in {path}, which continues from step {self.metadata.first_step} of a run; "
                f"load its checkpoint and pass first_step={self.metadata.first_step}"
            )
        if first_step > self.metadata.end_step:
            raise RunError(
                f"step {first_step} is not in {path}, which ends after {self.metadata.end_step} steps; "
                "plan more with --epochs"
            )
        self._steps = Prefetched(
            map(self._view.of_step, self._reader.steps(first_step)), depth=ahead, name="fcp-plan-cursor"
        )

    @property
    def metadata(self) -> PlanMetadata:
        return self._reader.metadata

    def first(self) -> Iterator[StepPlan]:
        """Yield the first step to train, if there is one, without consuming it."""
        return islice(PlanReader(self._path).steps(self._first_step), 1)

    def __iter__(self) -> Iterator[RankMicroBatches[Any]]:
        return iter(self._steps)

    def taken(self, loaded: Iterator[RankMicroBatches[ShardT]]) -> Iterator[RankMicroBatches[ShardT]]:
        """Yield the loaded micro-batches of the cursor's steps as the training loop takes them."""
        return loaded

    def close(self) -> None:
        """Stop reading."""
        self._steps.close()


def plan_path(given: str | Path | None) -> Path:
    """Return the plan given by the script, else FCP_PLAN, which `fcp launch` sets."""
    path = given or os.environ.get("FCP_PLAN")
    if not path:
        raise RunError(
            "no plan was given; pass plan=..., set FCP_PLAN, or start the script with 'fcp launch --plan PLAN'"
        )
    if not given and has_no_plan():
        raise RunError(
            f"the job was launched without a plan, which fcp makes by itself for {PLANNED_BY_ITSELF} alone; make one "
            "with 'fcp plan MANIFEST', and give it with 'fcp launch --plan PLAN'"
        )
    return Path(path)


def require_length(found_tokens: int, planned_tokens: int, *, row: int) -> None:
    """Raise RunError if row `row` of the data has fewer tokens than in the plan."""
    if found_tokens < planned_tokens:
        raise RunError(
            f"row {row} of the data has {found_tokens} tokens but {planned_tokens} in the plan: the plan was made from "
            "another manifest; build it again with 'fcp manifest build' and 'fcp plan'"
        )


# Record the plans that this process follows, to detect a script that trains without its plan.

_plans: set[Path] = set()


def note_follower(plan: Path) -> None:
    """Record that this rank starts to read its micro-batches from a plan."""
    _plans.add(plan)


def is_followed() -> bool:
    """Return whether this process follows a plan."""
    return bool(_plans)


# Fetch sequences for a plan of a mixture, whose row numbers run through all sources.


def mixed_fetch(plan: str | Path, fetch: Callable[[str, int], Any]) -> Callable[[int], Any]:
    """Return a session's `fetch`, given a function from a source and a row of it.

    Args:
        plan: a plan of `fcp plan --mix`.
        fetch: returns the sequence of (name of the source's manifest, row of that manifest).

    Raises:
        PlanError: the plan cannot be read.
        RunError: the plan has no mixture.
    """
    mixture = PlanReader(Path(plan)).metadata.mixture
    if mixture is None:
        raise RunError(f"{plan} is of one manifest; pass its fetch to the session directly")
    names = [source.name for source in mixture.sources]

    def fetch_row(row: int) -> Any:
        source, row = mixture.locate(row)
        return fetch(names[source], row)

    return fetch_row


# Run an iterator in a background thread, a bounded number of items ahead of its consumer.


class Prefetched(Generic[T]):
    """Iterator over `items` in order, produced in a background thread; its exceptions are raised at their position.

    At most `depth` items are buffered, plus the one being made. With `depth=0` there is no thread and items are made on
    request. `close` ends the thread; as a daemon, it never blocks interpreter exit.
    """

    def __init__(self, items: Iterable[T], *, depth: int, name: str) -> None:
        self._items: Iterator[T] = iter(items)
        self._depth = depth
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._finished = False
        self._closed = False
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._produce, name=name, daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._thread is None:
            return next(self._items)
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def close(self) -> None:
        """Stop making items and drop the buffered ones."""
        with self._changed:
            self._closed = self._finished = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()  # afterwards `items` no longer runs, and files that it reads may be closed

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._offer(item):
                    return
        except BaseException as error:  # of any kind, or the consumer would wait for a dead thread
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _offer(self, item: T) -> bool:
        """Append an item once there is room; return False if the consumer has closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify_all()
            return True
