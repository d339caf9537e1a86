"""`packing`: rows as fine-tuning libraries pack them."""

from __future__ import annotations

from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.problem import Assignment
from fcp_cli.planning.strategies.row_packing import make_solver
from tests.planning.examples import example_problem, table_of


def rows_of(
    lengths: list[int], *, tokens_per_rank: int, max_length: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """The ranks and the lengths of each row, in the order of the plan."""
    problem = example_problem(num_ranks=4, ranks_per_node=4, tokens_per_rank=tokens_per_rank)
    given = BatchSettings(global_batch_size=len(lengths), shuffle=False, max_length=max_length)
    batches = GlobalBatches(table_of(lengths), problem, given)
    found: Assignment = make_solver(batches).assign(batches.batch(0))
    pieces = zip(
        zip(found.rank_offsets, found.rank_offsets[1:], strict=False),
        zip(found.member_offsets, found.member_offsets[1:], strict=False),
        strict=True,
    )
    return [(found.ranks[a:b].tolist(), [lengths[i] for i in found.members[c:d]]) for (a, b), (c, d) in pieces]


def test_rows_are_packed_best_fit_decreasing_and_dealt_to_ranks_in_turn() -> None:
    rows = rows_of([90, 60, 50, 40, 35, 10, 100], tokens_per_rank=100)
    assert [(ranks, sorted(members)) for ranks, members in rows] == [
        ([0], [100]),
        ([1], [10, 90]),
        ([2], [40, 60]),
        ([3], [35, 50]),
    ]


def test_more_rows_than_ranks_go_around_again() -> None:
    assert [ranks for ranks, _ in rows_of([60] * 6, tokens_per_rank=100)] == [[0], [1], [2], [3], [0], [1]]


def test_rows_are_no_longer_than_max_length() -> None:
    rows = rows_of([30] * 4, tokens_per_rank=100, max_length=60)
    assert [members for _, members in rows] == [[30, 30], [30, 30]]


def test_a_sequence_that_no_rank_holds_makes_rings_of_all() -> None:
    rows = rows_of([150, 120, 60], tokens_per_rank=100)
    assert rows == [([0, 1], [150]), ([2, 3], [120, 60])]
