"""Shard and replica groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fcp_cli.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """This rank's shard and replica.

    Attributes:
        index: shard index of this rank.
        count: number of shards per replica; 1: not sharded.
        copy: replica index of this rank.
        mesh: device mesh for `fully_shard`, with dimension `shard`, or `replicate` and `shard`; None if not sharded.
    """

    index: int = 0
    count: int = 1
    copy: int = 0
    mesh: DeviceMesh | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks of this replica; None if not sharded."""
        return None if self.mesh is None else self.mesh.get_group("shard")

    @property
    def copy_group(self) -> dist.ProcessGroup | None:
        """Ranks with the same shard in all replicas; None if there is one replica."""
        if self.mesh is None:
            return dist.group.WORLD
        return self.mesh.get_group("replicate") if "replicate" in (self.mesh.mesh_dim_names or ()) else None

    def rows(self, total: int) -> slice:
        """Return this rank's rows out of `total`, split like `fully_shard`: the last shards may have fewer."""
        each = rows_each(total, self.count)
        return slice(min(self.index * each, total), min((self.index + 1) * each, total))


def rows_each(total: int, count: int) -> int:
    """Return the rows per shard; the last shards may have fewer or none."""
    return -(-total // count)


def open_shares(recipe: Recipe, *, rank: int, ranks: int, device_type: str) -> Shares:
    """Create the process groups for a recipe; consecutive ranks form a replica. Collective."""
    if recipe.zero_stage == 0:
        return Shares(copy=rank)
    count = recipe.shards(ranks)
    if count == ranks:
        mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device_type, (ranks // count, count), mesh_dim_names=("replicate", "shard"))
    return Shares(index=rank % count, count=count, copy=rank // count, mesh=mesh)
