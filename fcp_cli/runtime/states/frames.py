"""Encode the frames of a video on all ranks of a group: each its own, and the few before that a causal encoder needs.

The encoder of a video's latents (a causal VAE) looks back in time through each of its convolutions: a kernel of K
frames needs the K - 1 before, from whichever rank has them. So a rank that encodes a run of frames gathers, before
each such layer, the last frames of the ranks before it, by an `exchange` whose backward returns their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.exchange import Route, exchange, route
from fcp_cli.runtime.kernels.base import to_device
from fcp_cli.runtime.ring_attention.ring import Ring


def with_frames_before(frames: Tensor, reach: int, ring: Ring, *, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Return this rank's frames behind the last `reach` frames before them, which other ranks of the group hold.

    Collective over the group's ranks, and so is its backward where frames need gradients: on all of them, or on none.
    Call it before the model's forward, equally often on every rank.

    Args:
        frames: this rank's run of a video, `sizes[ring.index]` of them along `dim`; runs follow each other in the
            order of `ring.ranks`.
        reach: frames that a layer looks back at, >= 0.
        ring: the micro-batch's ring.
        sizes: frames of each rank of the group, which all ranks give alike; may be 0.
        dim: of the frames.

    Returns:
        The same with up to `reach` frames more in front: fewer where the video starts, and where a rank has no frames.

    Raises:
        RunError: the sizes are not those of the group, or of the frames.
    """
    if len(sizes) != ring.degree or frames.shape[dim] != sizes[ring.index]:
        raise RunError(
            f"{ring.place}: frames of {tuple(frames.shape)} (dimension {dim}) on rank {ring.ranks[ring.index]} do not "
            f"fit the sizes {list(sizes)} of the {ring.degree} ranks' runs; give one size for each rank of the group"
        )
    given, way = _route(tuple(sizes), reach, ring.ranks, ring.index)
    rows = frames.movedim(dim, 0)
    arrived = exchange(rows.index_select(0, to_device(torch.from_numpy(given), rows.device)), way, ring.transport)
    return torch.cat((arrived, rows)).movedim(0, dim)


@lru_cache(maxsize=128)
def _route(sizes: tuple[int, ...], reach: int, ranks: tuple[int, ...], index: int) -> tuple[IntArray, Route]:
    """Return the frames that a member sends, in order, and its part of the exchange."""
    stops = np.cumsum(sizes)
    starts = stops - sizes
    wanted = [
        np.arange(max(start - reach, 0), start) if size else np.arange(0)
        for start, size in zip(starts, sizes, strict=True)
    ]
    consumers = np.repeat(np.arange(len(sizes)), [len(of_one) for of_one in wanted])
    frames = np.concatenate(wanted)
    producers = np.searchsorted(stops, frames, side="right")
    given: IntArray = frames[producers == index] - starts[index]
    return given, route(producers, consumers, ranks=ranks, index=index)
