"""What each rank tells reaches all of them in the order of ranks, however much it is."""

from __future__ import annotations

import pytest
import torch

from fcp_cli.runtime.transport import gather_rows, gather_texts, gather_words
from fcp_cli.verification.emulation import ThreadWorld, run_ranks

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [None, CPU])
@pytest.mark.parametrize("counts", [(2, 0, 3), (0, 0, 0), (0, 1, 1)])
def test_rows_of_all_ranks_are_gathered_though_some_have_none(
    counts: tuple[int, ...], device: torch.device | None
) -> None:
    own = [torch.arange(2 * count).reshape(-1, 2) + 100 * rank for rank, count in enumerate(counts)]
    found = run_ranks(3, lambda meeting, rank: gather_rows(ThreadWorld(meeting, rank), own[rank], device))
    expected = [rows.tolist() for rows in own]
    assert [[rows.tolist() for rows in each] for each in found] == [expected] * 3


def test_words_and_texts_are_gathered_in_the_order_of_ranks() -> None:
    words = run_ranks(3, lambda meeting, rank: gather_words(ThreadWorld(meeting, rank), (rank, -rank)))
    assert words == [[[0, 0], [1, -1], [2, -2]]] * 3
    texts = ("é", "", "three")
    assert (
        run_ranks(3, lambda meeting, rank: gather_texts(ThreadWorld(meeting, rank), texts[rank])) == [list(texts)] * 3
    )
