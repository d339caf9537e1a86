"""Shard groups: the ranks that share one copy of sharded tensors, and the ranks that hold equal copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fcp_cli.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """This rank's place among the ranks of a job.

    Attributes:
        index: the index of the share that this rank keeps.
        count: shares that make up one copy; 1: every rank keeps everything.
        copy: index of this rank's copy; 0 on the ranks of the first.
        mesh: the mesh of all ranks, for `fully_shard`: `shard`, or `replicate` and `shard`; None if nothing is shared
            out.
    """

    index: int = 0
    count: int = 1
    copy: int = 0
    mesh: DeviceMesh | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that keep one copy between them; None if this rank keeps a whole copy."""
        return None if self.mesh is None else self.mesh.get_group("shard")

    @property
    def copy_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that keep the same share of other copies; None if there is one copy."""
        if self.mesh is None:
            return dist.group.WORLD
        return self.mesh.get_group("replicate") if "replicate" in (self.mesh.mesh_dim_names or ()) else None

    def rows(self, total: int) -> slice:
        """Return the rows of a tensor's `total` that this rank keeps, cut as `fully_shard` does: fewer at the end."""
        each = rows_each(total, self.count)
        return slice(min(self.index * each, total), min((self.index + 1) * each, total))


def rows_each(total: int, count: int) -> int:
    """Return how many rows a share has, but the last ones, which may have fewer or none."""
    return -(-total // count)


def open_shares(recipe: Recipe, *, rank: int, ranks: int, device_type: str) -> Shares:
    """Make the process groups that a recipe needs. Every rank calls it; ranks next to each other share a copy."""
    if recipe.zero_stage == 0:
        return Shares(copy=rank)
    count = recipe.shards(ranks)
    if count == ranks:
        mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device_type, (ranks // count, count), mesh_dim_names=("replicate", "shard"))
    return Shares(index=rank % count, count=count, copy=rank // count, mesh=mesh)
