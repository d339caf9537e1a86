"""Sum a small tensor over the members of a group, by the connections that its attention has."""

from __future__ import annotations

import torch
from torch import Tensor

from fcp_cli.runtime.communication.transport import GroupChannel, Waits
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
    shared = member.heads_degree
    place = member.index % shared
    first = member.index - place
    of_set = yield from _summed(GroupChannel(member.ranks[first : first + shared], place, member.transport), own)
    ring = member.ring_of_head_group() if shared > 1 else member
    return (yield from _summed(ring.channel, of_set))


def _summed(channel: GroupChannel, own: Tensor) -> Waits[Tensor]:
    if len(channel.ranks) == 1:
        return own
    return torch.sum((yield from channel.gather("sums", own)), dim=0)  # in the same order on all members
