from __future__ import annotations

import numpy as np

from fcp_cli.planning.strategies.skrull import local_ranks


def test_sequences_stay_local_where_a_rank_has_room_and_the_longest_are_shared_if_asked() -> None:
    tokens = np.array([6, 3, 3])
    assert local_ranks(tokens, tokens.astype(float), 2, 10, num_shared=0).tolist() == [0, 1, 1]
    assert local_ranks(tokens, tokens.astype(float), 2, 10, num_shared=1).tolist() == [-1, 0, 1]


def test_a_shared_sequence_that_takes_local_ones_room_away_makes_them_shared() -> None:
    # The third fits on no rank beside the others; shared, it leaves 10 - 1.5 tokens, too few for nine.
    tokens = np.array([9, 8, 3])
    owner = local_ranks(tokens, tokens.astype(float), 2, 10, num_shared=0)
    assert owner.tolist() == [-1, -1, -1] or owner.tolist() == [-1, 1, -1]
    together = tokens[owner < 0].sum() / 2
    held = np.bincount(owner[owner >= 0], tokens[owner >= 0], 2)
    assert (held + together <= 10).all()


def test_no_rank_ever_holds_more_than_its_limit() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        ranks, limit = int(generator.integers(1, 9)), 1000
        tokens = generator.integers(1, 3 * limit, 30)
        tokens = tokens[np.cumsum(tokens) <= ranks * limit]
        if len(tokens):
            owner = local_ranks(
                tokens, tokens.astype(float) ** 2, ranks, limit, num_shared=int(generator.integers(0, 3))
            )
            held = np.bincount(owner[owner >= 0], tokens[owner >= 0], ranks)
            assert (held + tokens[owner < 0].sum() / ranks <= limit + 1e-9).all()
