"""A rank's share of a pack's pictures, with its pixels."""

from __future__ import annotations

from collections.abc import Sequence

from fcp_cli.runtime.pictures.visuals import VisualPack, VisualShard, begin_visual_shard


def visual_shard(packs: Sequence[VisualPack], *, rank: int) -> VisualShard | None:
    """The result of `begin_visual_shard` once its pixels are there."""
    begun = begin_visual_shard(packs, rank=rank)
    return None if begun is None else begun()
