from __future__ import annotations

import numpy as np

from fcp_cli.planning.strategies.block_fcp import blocks_of, placed


def test_blocks_are_cut_at_4096_tokens_of_their_sequence_and_where_homes_change() -> None:
    tasks, block = blocks_of(np.array([10_000, 2000]), 2)
    assert tasks.tokens.tolist() == [4096.0, 1904.0, 2192.0, 1808.0, 2000.0]
    assert tasks.home.tolist() == [0, 0, 1, 1, 1]
    assert block.tolist() == [0, 1, 1, 2, 3]


def test_a_block_goes_to_the_least_attention_that_has_room_for_its_tokens() -> None:
    # Block 2 skips rank 1, which has less attention and no room; block 3 finds room nowhere.
    tokens, attention = np.array([9.0, 4.0, 5.0, 2.0]), np.array([3.0, 20.0, 9.0, 1.0])
    assert placed(tokens, attention, 2, 10).tolist() == [1, 0, 0, 0]
