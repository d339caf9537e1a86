"""Steps of a job that was launched without a plan: rank 0's planner process plans them ahead of the loop."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.file import steps_bytes, table_bytes, table_of
from fcp_cli.plan.metadata import PLANNING_VARIABLE, JobFacts, OnlineSettings, PlanningWish, settings_of_json
from fcp_cli.plan.step import StepPlan
from fcp_cli.runtime.cursor import orders_of_rank
from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.online import END, STEPS, Control, StreamSource, joined_message, on_rank_0
from fcp_cli.runtime.planner_process import JobProcess
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.inputs import read_object
from fcp_cli.util.validation import validated

_FIRST_STEPS: Final = 2  # planned before the loop starts
_STEPS_AT_ONCE: Final = 8
# Measurements to collect before fitting times: a minute of training, or this many steps if they are short.
_MEASURED_SECONDS: Final = 60.0
_MEASURED_STEPS: Final = 64
_MEASURED_MICROBATCHES: Final = 32


class JobSource(StreamSource):
    """Steps of a job whose sequences are the rows of its manifest.

    Args:
        settings: settings of the plan, with all its steps.
        path: path of the plan to write.
        control: messages between ranks.
        lengths: [rows] tokens of the training data.
        process: planner process on rank 0; None on other ranks.
    """

    def __init__(
        self, settings: OnlineSettings, path: Path, control: Control, lengths: IntArray, process: JobProcess | None
    ) -> None:
        super().__init__((), settings, path, control, None)
        self.lengths = lengths
        self._planner = process
        self._wants_measurements = process is not None and bool(process.opened["wants_measurements"])
        self._rows: deque[int] | None = None  # rows of this rank, in the order of its micro-batches

    def fetch_by(self, given: Fetch | None) -> Fetch | None:
        """Return the session's own `fetch`, since sequences are rows of its manifest."""
        return given

    def rows_ahead(self) -> Iterator[int | None]:
        """Yield the rows that this rank needs, in order and without end; None if the next one is not planned yet.

        Call it before the first step is planned.
        """
        self._rows = deque()
        return self._taken_rows(self._rows)

    @staticmethod
    def _taken_rows(rows: deque[int]) -> Iterator[int | None]:
        while True:
            yield rows.popleft() if rows else None

    def _begin_process(self, first_step: int) -> dict[str, Any]:
        assert self._planner is not None
        self._process = self._planner
        return dict(self._planner.opened)

    def _begin_reading(self, first_step: int, opened: Mapping[str, Any]) -> Callable[[], None] | None:
        return None

    def _plan_steps(self, due: int) -> bytes:
        assert self._planner is not None
        if due >= self.settings.metadata.end_step:
            return joined_message({"state": END})
        self._fit_times(due)
        steps = self._planner.plan(due, _FIRST_STEPS if due == self._first_step else _STEPS_AT_ONCE)
        return joined_message({"state": STEPS}, steps_bytes(steps))

    def _fit_times(self, due: int) -> None:
        """Plan further steps with measured times, once enough steps were trained; only rank 0 plans."""
        assert self._planner is not None
        if self._wants_measurements and self.measured.has(
            seconds=_MEASURED_SECONDS, steps=_MEASURED_STEPS, micro_batches=_MEASURED_MICROBATCHES
        ):
            self._wants_measurements = False
            print(f"fcp: {self._planner.refit(due, self.measured.take())['line']}", file=sys.stderr, flush=True)

    def _note_given(self, facts: Mapping[str, Any], steps: list[StepPlan], due: int) -> None:
        for step in steps:
            if self._rows is not None:
                for order in orders_of_rank(step, self._control.rank):
                    self._rows.extend(step.microbatch(int(order)).sequences)


# Plan a job that was launched without a plan: ranks read the lengths of their data, and rank 0 plans.


class Lengths(Protocol):
    """Tokens and images of each row of a loop's training data, as columns of a manifest."""

    def known(self) -> pa.Table | None:
        """Return the columns known from the data's storage or an earlier job, or None if rows must be read."""
        ...

    def read(self, rows: range) -> pa.Table:
        """Read the given rows and return their columns."""
        ...

    def keep(self, table: pa.Table) -> None:
        """Cache the columns of all rows for later jobs."""
        ...

    def __len__(self) -> int: ...


def job_source(plan: Path, control: Control, lengths: Lengths, facts: Callable[[], JobFacts]) -> JobSource:
    """Start to plan a job that was launched without a plan, and return its steps. Every rank calls it.

    Args:
        plan: path of the plan to write.
        control: messages between ranks.
        lengths: lengths of this rank's training data.
        facts: returns the facts of the loop, or raises if it is not supported.
    """
    job = _together(control, facts)
    found = _agreed_rows(control, lengths)
    process: JobProcess | None = None

    def begin() -> dict[str, Any]:
        nonlocal process
        process = JobProcess(plan, job, _wish(), found)
        return dict(process.opened)

    opened = on_rank_0(control, begin)
    settings = settings_of_json(json.loads(opened["settings"]), name="the planning process")
    return JobSource(settings, plan, control, found.column("length").to_numpy(), process)


def _together(control: Control, run: Callable[[], Any]) -> Any:
    """Return the result of `run`, or raise the first failed rank's error on all ranks."""
    found, fault = None, ""
    try:
        found = run()
    except FcpError as error:
        fault = str(error)
    failed = np.flatnonzero(control.table([int(bool(fault))])[:, 0]).tolist()
    if failed:
        raise RunError(control.from_rank(failed[0], fault.encode()).decode())
    return found


def _agreed_rows(control: Control, lengths: Lengths) -> pa.Table:
    """Return the columns of all rows; raise if their number, or columns known in advance, differ between ranks."""
    known: pa.Table | None = _together(control, lengths.known)
    rows = control.table([len(lengths), known is not None])
    if (rows[:, 0] != rows[0, 0]).any():
        other = int(np.flatnonzero(rows[:, 0] != rows[0, 0])[0])
        raise RunError(
            f"rank {other} has {rows[other, 0]} rows of training data, rank 0 has {rows[0, 0]}; {_SAME_DATA}"
        )
    if not rows[:, 1].all():
        return _read_together(control, lengths)
    assert known is not None
    digest = int.from_bytes(hashlib.blake2b(table_bytes(known), digest_size=7).digest(), "little")
    if len(set(control.table([digest])[:, 0].tolist())) > 1:
        _name_differing_row(control, known)
    return known


def _read_together(control: Control, lengths: Lengths) -> pa.Table:
    """Read every row on a single rank. If others have different rows, they notice when they load theirs."""
    mine = range(control.rank, len(lengths), control.size)
    own = table_bytes(_together(control, lambda: lengths.read(mine)))
    read = pa.concat_tables([table_of(control.from_rank(rank, own)) for rank in range(control.size)])
    rows = np.concatenate([np.arange(rank, len(lengths), control.size) for rank in range(control.size)])
    whole = read.take(np.argsort(rows)).combine_chunks()
    lengths.keep(whole)
    return whole


def _name_differing_row(control: Control, known: pa.Table) -> None:
    first, own = table_of(control.from_rank(0, table_bytes(known))).to_pylist(), known.to_pylist()
    differing = next((row for row, (one, other) in enumerate(zip(first, own, strict=True)) if one != other), -1)
    at = max(differing, 0)
    told = control.table([differing, own[at]["length"]])
    rank = int(np.flatnonzero(told[:, 0] >= 0)[0])
    row, tokens = told[rank].tolist()
    raise RunError(
        f"row {row} of the training data has {tokens} tokens on rank {rank}, but {first[row]['length']} on rank 0; "
        f"{_SAME_DATA}"
    )


_SAME_DATA = "give every rank the same data: the same files, filters and seeds"


def _wish() -> PlanningWish:
    path = os.environ[PLANNING_VARIABLE]
    return validated(read_object(Path(path), error=RunError), PlanningWish, where=path, error=RunError)
