"""Rows that travel between ranks, as all ranks in lock step; the encoder of a real model is in test_vision_language."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lockstep import LockstepTransport, run_lockstep
from fcp_cli.runtime.exchange import Route, exchange, move_rows, route
from fcp_cli.verification.emulation import Mailbox
from fcp_cli.verification.order import check_order
from fcp_cli.verification.recording import RecordingTransport

pytestmark = pytest.mark.torch


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int], tuple[int, ...]]:
    """(producers, consumers, ranks): any rank may compute any row, any rank or nobody may need it."""
    size = draw(st.integers(1, 6))
    number = draw(st.integers(0, 40))
    producers = draw(st.lists(st.integers(0, size - 1), min_size=number, max_size=number))
    consumers = draw(st.lists(st.integers(-1, size - 1), min_size=number, max_size=number))
    ranks = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size, unique=True))
    return producers, consumers, tuple(sorted(ranks))


def routes(producers: list[int], consumers: list[int], ranks: tuple[int, ...]) -> list[Route]:
    tables = np.array(producers, dtype=np.int64), np.array(consumers, dtype=np.int64)
    return [route(*tables, ranks=ranks, index=index) for index in range(len(ranks))]


@settings(max_examples=60)
@given(tables())
def test_every_row_arrives_in_order_and_no_order_of_messages_can_deadlock(
    table: tuple[list[int], list[int], tuple[int, ...]],
) -> None:
    producers, consumers, ranks = table
    whole = torch.arange(2.0 * len(producers)).reshape(-1, 2)
    mailbox = Mailbox()
    transports = [RecordingTransport(LockstepTransport(mailbox, rank)) for rank in ranks]
    members = [
        move_rows("rows", whole[torch.tensor(producers) == i], one, transports[i], num_outputs=one.num_outputs)
        for i, one in enumerate(routes(*table))
    ]
    for i, out in enumerate(run_lockstep(members)):
        assert torch.equal(out, whole[torch.tensor(consumers) == i])
    check_order({rank: transport.operations for rank, transport in zip(ranks, transports, strict=True)})


def test_rows_that_nobody_needs_get_zero_gradient() -> None:
    (one,) = routes([0, 0, 0], [0, -1, 0], (4,))
    rows = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)  # the fourth is a dummy, outside the table
    out = exchange(rows, one, None)
    torch.autograd.backward(out, torch.full_like(out, 2.0))
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [2.0, 0.0, 2.0, 0.0]


def test_a_rank_that_gets_nothing_still_has_a_path_to_what_it_computed() -> None:
    (one,) = routes([], [], (4,))
    dummy = torch.ones(1, 3, requires_grad=True)
    torch.autograd.backward(exchange(dummy, one, None).sum())
    assert dummy.grad is not None
    assert not dummy.grad.any()
