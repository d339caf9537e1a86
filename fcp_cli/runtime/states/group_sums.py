"""Sum a small tensor over the members of a group, by the connections that its attention has."""

from __future__ import annotations

import torch
from torch import Tensor

from fcp_cli.runtime.communication.transport import Transport, Waits
from fcp_cli.runtime.ring_attention.ring import Ring


def summed_over_members(member: Ring, own: Tensor) -> Waits[Tensor]:
    """Return the sum over all members of a group, equal on each; yield the handles it waits for. Collective over them.

    Around the set of those that share heads, then around the ring of sets: members that do not meet in attention do not
    meet here. Each sends a tensor's bytes d - 1 times at most.

    Args:
        member: this member's view of the group.
        own: its tensor, equally large on all.
    """
    if member.degree == 1:
        return own
    assert member.transport is not None
    shared = member.heads_degree
    place = member.index % shared
    first = member.index - place
    of_set = yield from _around(member.ranks[first : first + shared], place, own, member.transport)
    ring = member.ring_of_head_group() if shared > 1 else member
    return (yield from _around(ring.ranks, ring.index, of_set, member.transport))


def _around(ranks: tuple[int, ...], index: int, own: Tensor, transport: Transport) -> Waits[Tensor]:
    """Pass every member's tensor around these ranks; return their sum, added up in one order everywhere."""
    degree = len(ranks)
    if degree == 1:
        return own
    held = own.new_empty(degree, *own.shape)
    held[index] = own
    for hop in range(degree - 1):
        sent, arriving = (index - hop) % degree, (index - hop - 1) % degree
        yield transport.start("sums", held[sent], ranks[(index + 1) % degree], held[arriving], ranks[index - 1])
    return torch.sum(held, dim=0)
