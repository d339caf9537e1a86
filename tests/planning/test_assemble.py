from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import BrokenAssignmentError, assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.problem import Assignment
from tests.planning.examples import example_problem, table_of


def assignment_of(packs: list[tuple[list[int], list[int]]], waves: list[int] | None = None) -> Assignment:
    def offsets(lists: list[list[int]]) -> Any:
        return np.concatenate(([0], np.cumsum([len(one) for one in lists]))).astype(np.int64)

    ranks, members = [pack[0] for pack in packs], [pack[1] for pack in packs]
    return Assignment(
        wave=np.array(waves or [-1] * len(packs), dtype=np.int32),
        rank_offsets=offsets(ranks),
        ranks=np.array(list(chain.from_iterable(ranks)), dtype=np.int32),
        member_offsets=offsets(members),
        members=np.array(list(chain.from_iterable(members)), dtype=np.int64),
    )


def test_seconds_follow_the_cost_model_and_ring_bandwidth_the_placement() -> None:
    problem = example_problem(num_ranks=8, ranks_per_node=4)
    batch = batch_of(table_of([20_000, 20_000, 3_000]), problem)
    step = assemble(assignment_of([([0, 1], [0]), ([3, 4], [1]), ([2], [2])]), batch, problem)
    linear, attention = 2.838e-4 * 20_000 / 2, 6.451e-9 * 20_000**2 / 2
    ring_inter = 442368 * 20_000 / 2 / 12e9 + 0.001
    assert step.seconds[0] == pytest.approx(0.1 + linear + attention)  # the ring hides behind attention
    assert step.seconds[1] == pytest.approx(0.1 + linear + max(attention, ring_inter))
    assert step.seconds[2] == pytest.approx(0.1 + 2.838e-4 * 3_000 + 6.451e-9 * 3_000**2)


def test_under_iteration_a_rank_without_any_work_gets_one_idle_row_at_the_end() -> None:
    problem = example_problem(num_ranks=4, ranks_per_node=4)
    step = assemble(
        assignment_of([([0, 1], [0]), ([0], [1]), ([2], [2])]), batch_of(table_of([100, 200, 300]), problem), problem
    )
    rows = list(step.microbatches())
    assert [row.ranks for row in rows] == [(0, 1), (0,), (2,), (3,)]
    assert rows[3].is_idle
    assert rows[3].seconds == 0
    assert rows[1].start_seconds == rows[0].seconds
    assert step.makespan_seconds == max(row.start_seconds + row.seconds for row in rows)


def test_under_microbatch_every_wave_uses_every_rank_once() -> None:
    problem = example_problem("microbatch", num_ranks=3, ranks_per_node=3)
    step = assemble(
        assignment_of([([2], [0]), ([0, 1], [1]), ([1], [2])], waves=[0, 0, 1]),
        batch_of(table_of([9000, 200, 300]), problem),
        problem,
    )
    rows = list(step.microbatches())
    assert [(row.wave, row.ranks, row.sequences) for row in rows] == [
        (0, (2,), (0,)),
        (0, (0, 1), (1,)),
        (1, (1,), (2,)),
        (1, (0,), ()),
        (1, (2,), ()),
    ]
    assert all(row.start_seconds == rows[0].seconds for row in rows[2:])
    assert step.makespan_seconds == rows[0].seconds + rows[2].seconds


@pytest.mark.parametrize(
    ("packs", "defect"),
    [
        ([([0], [0, 1])], "member 2 (manifest row 2, 2,011 tokens) occurs 0 times, not once (1 of 3 do not)"),
        (
            [([0], [0, 1]), ([1], [1, 2])],
            "member 1 (manifest row 1, 1,990 tokens) occurs 2 times, not once (1 of 3 do not)",
        ),
        ([([0], [0, 1, 2, 7])], "member 7 of 3: members are positions in the batch"),
        ([([0], [0]), ([0, 1], [1, 2])], "order 1: 4,001 tokens on 2 ranks, where 4,000 fit"),
        ([([1, 0], [0, 1, 2])], "order 0: its ranks do not ascend: 0 follows 1"),
        ([([0, 0], [0, 1, 2])], "order 0: its ranks do not ascend: 0 follows 0"),
        ([([0, 4], [0, 1, 2])], "rank 4 of a job of 4"),
        ([([0], [0, 1]), ([1], []), ([2], [2])], "a micro-batch without ranks or sequences"),
    ],
)
def test_a_broken_assignment_is_refused(packs: list[tuple[list[int], list[int]]], defect: str) -> None:
    problem = example_problem(num_ranks=4, ranks_per_node=4, tokens_per_rank=2000)
    with pytest.raises(BrokenAssignmentError, match=re.escape(defect)):
        assemble(assignment_of(packs), batch_of(table_of([10, 1990, 2011]), problem), problem)


@pytest.mark.parametrize(
    ("sync", "waves", "defect"),
    [
        ("iteration", [0, 0], "order 0: wave 0 under sync iteration, not -1"),
        ("microbatch", [0, 2], "waves do not count up"),
        ("microbatch", [1, 1], "waves do not count up"),
        ("microbatch", [1, 0], "waves do not count up"),
        ("microbatch", [0, 0], "wave 0 uses rank 1 2 times, not once"),
    ],
)
def test_broken_waves_are_refused(sync: Sync, waves: list[int], defect: str) -> None:
    problem = example_problem(sync, num_ranks=4)
    assignment = replace(assignment_of([([0, 1], [0]), ([1], [1])]), wave=np.array(waves, dtype=np.int32))
    with pytest.raises(BrokenAssignmentError, match=defect):
        assemble(assignment, batch_of(table_of([10, 20]), problem), problem)
