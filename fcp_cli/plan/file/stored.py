"""Validation of plan rows at the trust boundary: steps as stored, each with its first invalid value.

Values that pass here are safe to index with, divide by and sum; no reader behind it checks again. Further rules of a
valid plan (budget, coverage, times that follow from the profile) are checked by `plan.check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fcp_cli.arrays import FloatArray
from fcp_cli.plan.file.schema import schema_of, steps_from_arrow
from fcp_cli.plan.layout import BrokenRule, broken_heads, broken_ranks, first_of
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.step import StepPlan
from fcp_cli.reading.documents import DamagedError
from fcp_cli.words import counted

MOST_SECONDS: Final = 1e15
"""Thirty million years; sums over the steps of a plan stay exact to the second."""


def stored_steps(table: pa.Table, num_ranks: int, rows: int) -> Iterator[tuple[StepPlan, BrokenRule | None]]:
    """Yield the steps of a table sorted by step, each with its first fault, or None.

    Args:
        table: the columns of a plan, without nulls and with whole steps only.
        num_ranks, rows: ranks of the job and rows of the manifest, the bounds of a step's indices.
    """
    order = table.column("order").to_numpy()
    unpaired = list_sizes(table, "sequences") != list_sizes(table, "lengths")
    start = 0
    for step in steps_from_arrow(table):
        here = slice(start, start + len(step))
        yield step, _broken_rows(step, order[here], unpaired[here]) or broken_values(step, num_ranks, rows)
        start = here.stop


def steps_in_order(table: pa.Table, metadata: PlanMetadata, *, rows: int, due: int) -> list[StepPlan]:
    """Return the consecutive steps of a table from a journal; the first must be step `due`.

    Raises:
        DamagedError: the columns are not those of the plan, or a step is invalid or out of order.
    """
    if not table.schema.equals(schema_of(splits_heads=metadata.attention is not None)):
        raise DamagedError("it does not have the columns of steps")
    steps: list[StepPlan] = []
    for step, fault in stored_steps(table, metadata.num_ranks, rows):
        if fault is not None or step.step != due + len(steps):
            raise DamagedError(str(fault or f"step {step.step} stands in place of step {due + len(steps)}"))
        steps.append(step)
    return steps


def broken_values(step: StepPlan, num_ranks: int, rows: int) -> BrokenRule | None:
    """Return the first invalid value of a step, or None."""
    return (
        broken_ranks(step, num_ranks)
        or broken_heads(step)
        or _broken_sequences(step, rows)
        or _broken_waves(step)
        or _broken_times(step)
    )


def broken_seconds(values: FloatArray) -> npt.NDArray[np.bool_]:
    """Return a mask of the seconds that are negative, NaN or above `MOST_SECONDS`."""
    return ~((values >= 0) & (values <= MOST_SECONDS))  # negated, because NaN fails every comparison


def list_sizes(table: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """Return [rows] the length of each list of a column."""
    return np.asarray(pc.list_value_length(table.column(column)).to_numpy(), dtype=np.int64)


def _broken_rows(step: StepPlan, order: npt.NDArray[np.int32], unpaired: npt.NDArray[np.bool_]) -> BrokenRule | None:
    wrong = np.flatnonzero(order != np.arange(len(step)))
    if len(wrong):
        return BrokenRule(step=step.step, message=f"rows out of order: order {order[wrong[0]]} in place {wrong[0]}")
    if unpaired.any():
        message = "as many sequences as lengths are needed"
        return BrokenRule(step=step.step, order=first_of(unpaired), message=message)
    return None


def _broken_sequences(step: StepPlan, rows: int) -> BrokenRule | None:
    outside = (step.sequences < 0) | (step.sequences >= rows)
    if outside.any():
        row = step.sequences[first_of(outside)]
        return BrokenRule(step=step.step, message=f"sequence {row} of a manifest of {counted(rows, 'row')}")
    empty = step.lengths < 1
    if empty.any():
        at = first_of(empty)
        message = f"sequence {step.sequences[at]} has {step.lengths[at]} tokens"
        return BrokenRule(step=step.step, message=message)
    return None


def _broken_waves(step: StepPlan) -> BrokenRule | None:
    outside = (step.wave < -1) | (step.wave >= len(step))
    if not outside.any():
        return None
    order = first_of(outside)
    return BrokenRule(step=step.step, order=order, message=f"wave {step.wave[order]} of {counted(len(step), 'row')}")


def _broken_times(step: StepPlan) -> BrokenRule | None:
    for name, values in (("start_seconds", step.start_seconds), ("seconds", step.seconds)):
        wrong = broken_seconds(values)
        if wrong.any():
            order = first_of(wrong)
            return BrokenRule(step=step.step, order=order, message=f"{name} is {values[order]}")
    for name, value in (("step_seconds", step.makespan_seconds), ("step_bound_seconds", step.bound_seconds)):
        if not 0 <= value <= MOST_SECONDS:
            return BrokenRule(step=step.step, message=f"{name} is {value}")
    return None
