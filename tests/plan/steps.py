"""Steps, hand-written and drawn by hypothesis, with makespans from the definition of a plan's times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from fcp_cli.plan.metadata import Sync
from fcp_cli.plan.step import StepPlan


class Row(NamedTuple):
    ranks: Sequence[int]
    seconds: float
    wave: int = -1
    lengths: Sequence[int] = (8,)


def make_step(rows: Sequence[Row], *, step: int = 0) -> StepPlan:
    """A step whose predicted starts are left at 0."""
    sequences = sum(len(row.lengths) for row in rows)
    return StepPlan(
        step=step,
        wave=np.array([row.wave for row in rows], dtype=np.int32),
        rank_offsets=np.cumsum([0, *(len(row.ranks) for row in rows)], dtype=np.int64),
        ranks=np.array([rank for row in rows for rank in row.ranks], dtype=np.int32),
        sequence_offsets=np.cumsum([0, *(len(row.lengths) for row in rows)], dtype=np.int64),
        sequences=np.arange(sequences, dtype=np.int64),
        lengths=np.array([length for row in rows for length in row.lengths], dtype=np.int32),
        start_seconds=np.zeros(len(rows)),
        seconds=np.array([row.seconds for row in rows], dtype=np.float64),
        makespan_seconds=1.0,
        bound_seconds=1.0,
    )


def planned_makespan(rows: Sequence[Row], num_ranks: int, sync: Sync) -> float:
    """The plan's time base, written as its definition says."""
    if sync == "microbatch":
        waves = sorted({row.wave for row in rows})
        return sum(max(row.seconds for row in rows if row.wave == wave) for wave in waves)
    free = [0.0] * num_ranks
    for row in rows:
        end = max(free[rank] for rank in row.ranks) + row.seconds
        for rank in row.ranks:
            free[rank] = end
    return max(free)


seconds = st.floats(min_value=0.01, max_value=100.0)


@st.composite
def iteration_rows(draw: st.DrawFn, num_ranks: int) -> list[Row]:
    groups = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    return [Row(sorted(draw(groups)), draw(seconds)) for _ in range(draw(st.integers(1, 12)))]


@st.composite
def microbatch_rows(draw: st.DrawFn, num_ranks: int) -> list[Row]:
    rows: list[Row] = []
    for wave in range(draw(st.integers(1, 4))):
        groups = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
        for group in sorted(set(groups)):
            ranks = [rank for rank in range(num_ranks) if groups[rank] == group]
            idle = group == 2 and len(ranks) == 1
            rows.append(Row(ranks, 0.0 if idle else draw(seconds), wave, () if idle else (8,)))
    return rows


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Row], int, Sync]:
    num_ranks = draw(st.integers(1, 6))
    sync: Sync = draw(st.sampled_from(["iteration", "microbatch"]))
    rows = iteration_rows(num_ranks) if sync == "iteration" else microbatch_rows(num_ranks)
    return draw(rows), num_ranks, sync
