from __future__ import annotations

from fcp_cli.planning.published.megatron_packing import packed_rounds


def _groups(lengths: list[int], *, num_ranks: int) -> list[list[tuple[int, list[int]]]]:
    rounds = packed_rounds(lengths, max_tokens_per_rank=1000, num_ranks=num_ranks)
    return [[(group.degree, group.sequences) for group in groups] for groups in rounds]


def test_a_sequence_takes_more_ranks_than_it_needs_where_that_relieves_the_busiest() -> None:
    # 900 needs one rank, as 1000 does, but on the two ranks that are left it ends sooner than on one.
    assert _groups([1000, 900], num_ranks=4) == [[(2, [0]), (2, [1])]]


def test_short_sequences_join_a_group_until_a_rank_is_full() -> None:
    ((first, second),) = _groups([800, 700, 200, 300], num_ranks=2)
    assert (first, second) == ((1, [0, 2]), (1, [1, 3]))


def test_what_no_rank_has_room_for_waits_for_the_next_microbatch() -> None:
    assert [len(groups) for groups in _groups([1000, 1000, 1000], num_ranks=2)] == [2, 1]


def test_ranks_that_no_doubling_can_fill_run_everything_on_one_group() -> None:
    assert _groups([1900, 1800], num_ranks=5) == [[(5, [0, 1])]]
