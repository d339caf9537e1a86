"""Rows before each chunk, brought from the members that hold them, and their gradients back: all in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.lockstep import LockstepTransport, run_lockstep
from fcp_cli.runtime.communication.transport import GroupChannel, Waits
from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.ring_attention.halo import FetchedRows, Halo, ReturnedRows, halo_of
from fcp_cli.verification.emulation import Mailbox
from fcp_cli.verification.order import check_order
from fcp_cli.verification.recording import RecordingTransport

pytestmark = pytest.mark.torch

LENGTHS: list[tuple[int, ...]] = [(), (1,), (64,), (5, 7, 13, 37, 101), (3, 100, 1, 2)]
REACHES = (1, 3, 40, 200)


def forward(halo: Halo, channel: GroupChannel, own: Tensor, more: Tensor) -> Waits[list[Tensor]]:
    return (yield from FetchedRows("halo", halo, channel, own, more).rows())


def backward(halo: Halo, channel: GroupChannel, grads: Tensor) -> Waits[Tensor]:
    own, received = grads[: halo.tokens].clone(), grads[halo.tokens :].clone()
    yield from ReturnedRows("dhalo", halo, channel, received).add_to(own)
    return own


@pytest.mark.parametrize("degree", (1, 2, 3, 4, 7))
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_chunk_gets_the_rows_before_it_and_gradients_go_back(lengths: tuple[int, ...], degree: int) -> None:
    layout, total = shard_layout(lengths, degree), sum(lengths)
    for reach in REACHES:
        # Each row says who it is: sequence and position.
        names = torch.cat(
            [torch.tensor([[s, p] for p in range(length)]) for s, length in enumerate(lengths)] or [torch.empty(0, 2)]
        )
        ranks = tuple(10 + 3 * i for i in range(degree))
        mailbox = Mailbox()
        recorders = [RecordingTransport(LockstepTransport(mailbox, rank)) for rank in ranks]
        channels = [GroupChannel(ranks, i, recorder) for i, recorder in enumerate(recorders)]
        halos = [halo_of(layout, i, reach) for i in range(degree)]
        own = [names[torch.from_numpy(layout.index(i))].double() for i in range(degree)]
        fetched = run_lockstep(
            [forward(h, c, o, o[:, None, :1] + 0.5) for h, c, o in zip(halos, channels, own, strict=True)]
        )
        expected = torch.zeros(total, 2, dtype=torch.float64)
        gradients = []
        for i, (halo, (rows, more)) in enumerate(zip(halos, fetched, strict=True)):
            assert rows.shape == (halo.received, 2)
            assert more.shape == (halo.received, 1, 1)
            assert torch.equal(more[:, 0, 0], rows[:, 0] + 0.5)
            held = torch.cat((own[i], rows))
            assert len(torch.unique(held, dim=0)) == len(held)  # no row comes twice, nor one that the member has
            before = held[torch.from_numpy(halo.before)].tolist()
            wanted = []
            for first, size, count in zip(halo.firsts, halo.sizes, halo.counts, strict=True):
                sequence, start = own[i][first].tolist()
                assert count == min(reach, start)
                assert own[i][first : first + size].tolist() == [[sequence, start + j] for j in range(size)]
                wanted += [[sequence, start - count + j] for j in range(count)]
            assert before == wanted
            assert int(halo.sizes.sum()) == layout.tokens(i)
            looked_at = {tuple(row) for row in wanted}
            assert {tuple(row) for row in rows.tolist()} <= looked_at  # nothing comes that is not looked at
            gradients.append(torch.randn(len(held), 2, dtype=torch.float64))
            places = torch.tensor([_place(lengths, row) for row in held.tolist()], dtype=torch.long)
            expected.index_add_(0, places, gradients[-1])
        returned = run_lockstep([backward(h, c, g) for h, c, g in zip(halos, channels, gradients, strict=True)])
        for i, found in enumerate(returned):
            assert torch.allclose(found, expected[torch.from_numpy(layout.index(i))], rtol=0, atol=1e-12)
        check_order({rank: recorder.operations for rank, recorder in zip(ranks, recorders, strict=True)})


def _place(lengths: tuple[int, ...], row: list[float]) -> int:
    return sum(lengths[: int(row[0])]) + int(row[1])


def test_long_chunks_meet_their_neighbours_once_and_no_one_else() -> None:
    for degree in range(2, 9):
        for index in range(degree):
            halo = halo_of(shard_layout((640, 333), degree), index, 15)
            (messages,) = halo.rounds
            assert {m.to for m in messages if m.num_sent} <= {index - 1, index + 1}
            # At the start of a sequence, and between the two chunks in the middle, nothing is looked at.
            chunks = 2 - (index == 0) - (index == degree - 1)
            assert halo.received == 2 * 15 * chunks


def test_rows_received_do_not_grow_with_the_length() -> None:
    received = [halo_of(shard_layout((length,), 4), 1, 127).received for length in (4096, 65536)]
    assert received == [254, 254]
