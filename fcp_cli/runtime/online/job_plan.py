"""Begin to plan a job that was launched without a plan: the ranks read their data's lengths, rank 0 plans."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.job_facts import PLANNING_VARIABLE, JobFacts, PlanningWish
from fcp_cli.plan.online import settings_of_json
from fcp_cli.reading.documents import read_object
from fcp_cli.runtime.online.control import Control
from fcp_cli.runtime.online.job_source import JobSource
from fcp_cli.runtime.online.process import JobProcess
from fcp_cli.validation import validated


class Lengths(Protocol):
    """The tokens of each row of a loop's training data."""

    def known(self) -> IntArray | None:
        """Return [rows] tokens that the data's storage or an earlier job tells; None: rows have to be read."""
        ...

    def read(self, rows: range) -> IntArray:
        """Read these rows, and return their tokens."""
        ...

    def keep(self, lengths: IntArray) -> None:
        """Cache the lengths for later jobs."""
        ...

    def __len__(self) -> int: ...


def job_source(plan: Path, control: Control, lengths: Lengths, facts: Callable[[], JobFacts]) -> JobSource:
    """Return the steps of a job that was launched without a plan, which begin to be planned. Every rank calls it.

    Args:
        plan: where the plan is to be.
        control: all ranks.
        lengths: of this rank's training data.
        facts: of the loop; may refuse it.

    Raises:
        FcpError: the loop or its data cannot be planned, or ranks have different data; on all ranks.
    """
    job = _together(control, facts)
    found = _agreed_lengths(control, lengths)
    process: JobProcess | None = None
    opened: dict[str, Any] = {}
    if control.rank == 0:
        try:
            process = JobProcess(plan, job, _wish(), found)
            opened = dict(process.opened)
        except FcpError as error:
            opened = {"error": str(error)}
    opened = json.loads(control.from_rank(0, json.dumps(opened).encode()))
    if "error" in opened:
        raise RunError(opened["error"])
    settings = settings_of_json(json.loads(opened["settings"]), name="the planning process")
    return JobSource(settings, plan, control, found, process)


def _together(control: Control, run: Callable[[], Any]) -> Any:
    """Return the result of `run`, or raise the first rank's error on all ranks."""
    found, fault = None, ""
    try:
        found = run()
    except FcpError as error:
        fault = str(error)
    failed = np.flatnonzero(control.table([int(bool(fault))])[:, 0]).tolist()
    if failed:
        raise RunError(control.from_rank(failed[0], fault.encode()).decode())
    return found


def _agreed_lengths(control: Control, lengths: Lengths) -> IntArray:
    """Return [rows] tokens, after making sure that all ranks have the same data, as far as lengths can tell."""
    known: IntArray | None = _together(control, lengths.known)
    rows = control.table([len(lengths), known is not None])
    if (rows[:, 0] != rows[0, 0]).any():
        other = int(np.flatnonzero(rows[:, 0] != rows[0, 0])[0])
        raise RunError(
            f"rank {other} has {rows[other, 0]} rows of training data, rank 0 has {rows[0, 0]}; {_SAME_DATA}"
        )
    if not rows[:, 1].all():
        return _read_together(control, lengths)
    assert known is not None
    digest = int.from_bytes(hashlib.blake2b(known.tobytes(), digest_size=7).digest(), "little")
    if len(set(control.table([digest])[:, 0].tolist())) > 1:
        _name_differing_row(control, known)
    return known


def _read_together(control: Control, lengths: Lengths) -> IntArray:
    """Read every row on one of the ranks; that others have the same is seen when they load theirs."""
    rows = len(lengths)
    mine = range(control.rank, rows, control.size)
    found = np.zeros(rows, dtype=np.int64)
    found[mine.start : mine.stop : mine.step] = _together(control, lambda: lengths.read(mine))
    whole: IntArray = control.table(found.tolist()).sum(axis=0)
    lengths.keep(whole)
    return whole


def _name_differing_row(control: Control, known: IntArray) -> None:
    first = np.frombuffer(control.from_rank(0, known.tobytes()), dtype=np.int64)
    differing = np.flatnonzero(first != known)
    at = int(differing[0]) if len(differing) else 0
    told = control.table([at if len(differing) else -1, int(known[at])])
    rank = int(np.flatnonzero(told[:, 0] >= 0)[0])
    row, tokens = told[rank].tolist()
    raise RunError(
        f"row {row} of the training data has {tokens} tokens on rank {rank}, but {first[row]} on rank 0; {_SAME_DATA}"
    )


_SAME_DATA = "give every rank the same data: the same files, filters and seeds"


def _wish() -> PlanningWish:
    path = os.environ[PLANNING_VARIABLE]
    return validated(read_object(Path(path), error=RunError), PlanningWish, where=path, error=RunError)
