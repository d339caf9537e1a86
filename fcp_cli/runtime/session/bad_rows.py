"""Rows of a step whose images failed to decode on some rank."""

from __future__ import annotations

import torch

from fcp_cli.runtime.communication.world import World


def agree_on_bad_rows(world: World, device: torch.device, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the manifest rows of all ranks, sorted; the same on all ranks. Every rank calls it.

    Args:
        world: all ranks of the job.
        device: of the collectives.
        own: manifest rows that failed on this rank.
    """
    counts = torch.zeros(world.size, dtype=torch.int64, device=device)
    counts[world.rank] = len(own)
    world.all_reduce_sum(counts)
    ends = counts.cumsum(0).tolist()
    if not ends[-1]:
        return ()
    rows = torch.zeros(ends[-1], dtype=torch.int64, device=device)
    rows[ends[world.rank] - len(own) : ends[world.rank]] = torch.tensor(own, dtype=torch.int64, device=device)
    world.all_reduce_sum(rows)
    return tuple(sorted(set(rows.tolist())))
