"""Measured steps of a stream on rank 0, collected for the next refit."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from fcp_cli.plan.file.messages import table_bytes


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
