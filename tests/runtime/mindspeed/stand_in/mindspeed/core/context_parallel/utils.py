"""What MindSpeed's ring is made of."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RingP2P:
    """Messages between the members of a ring, named by global ranks. This one lets all talk to all."""

    def __init__(self, ring_global_ranks: list[int], group: dist.ProcessGroup) -> None:
        self.ranks = ring_global_ranks
        self.group = group

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """Give part i to member i; returns what each member gave, of the same shape."""
        own = self.ranks.index(dist.get_rank())
        received = [torch.empty_like(part) for part in parts]
        received[own] = parts[own]
        works: list[Any] = []
        for member, rank in enumerate(self.ranks):
            if member != own:
                works.append(dist.isend(parts[member].contiguous(), rank, self.group))
                works.append(dist.irecv(received[member], rank, self.group))
        for work in works:
            work.wait()
        return received


def unflatten_softmax(x: Tensor, sub_seq_len: list[int]) -> Tensor:
    """With MindSpeed's mistake: a transposed tensor has no such view."""
    heads, lanes = x.shape[1:]
    rows = torch.split_with_sizes(x.view(-1, lanes), [length * heads for length in sub_seq_len])
    merged = torch.cat([part.view(-1, heads, lanes).transpose(0, 1).view(-1, lanes) for part in rows])
    return merged.view(x.shape)
