"""The images and videos of a micro-batch: which member of the ring encodes each, and whose tokens they become.

Stage 1: every member encodes some parts (an image, a pair of frames, a tile), shared out so that their work is even,
whatever tokens the member holds. Stage 2: an `exchange` takes each part's embeddings to the members that hold its
tokens. Both follow from the sequences' tokens and sizes, which all members of a ring read; pixels are read only by the
member that encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.exchange import Route, route
from fcp_cli.runtime.layout import ShardLayout
from fcp_cli.vision.parts import Kind, PixelsRead, VisualPart, begin_reading, share_out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualShard:
    """One member's share of a pack's images and videos.

    Attributes:
        parts: what it encodes, in order.
        pixels: their input, [patches, ...]; None where it encodes nothing.
        kinds: kind of each of the visual tokens that it holds, in the order of its tokens.
        route: takes the embeddings of its parts [their tokens, ...] to those of its tokens [len(kinds), ...].
        problems: why the pictures of a sequence of the pack could not be read, by its place; they are blank then.
    """

    parts: tuple[VisualPart, ...]
    pixels: Tensor | None
    kinds: tuple[Kind, ...]
    route: Route
    problems: Mapping[int, str] = field(default_factory=dict)

    def map_pixels(self, change: Callable[[Tensor], Tensor]) -> VisualShard:
        """Return the same with changed pixels: on another device, in page-locked memory."""
        return self if self.pixels is None else replace(self, pixels=change(self.pixels))


def visual_shard(
    parts: Sequence[Sequence[VisualPart]], layout: ShardLayout, *, ranks: tuple[int, ...], member: int
) -> VisualShard | None:
    """Return what `begin_visual_shard` begins, with its pixels."""
    begun = begin_visual_shard(parts, layout, ranks=ranks, member=member)
    return None if begun is None else begun()


def begin_visual_shard(
    parts: Sequence[Sequence[VisualPart]], layout: ShardLayout, *, ranks: tuple[int, ...], member: int
) -> Callable[[], VisualShard] | None:
    """Begin to read the pixels that one member encodes of a pack; None where the pack has no part.

    Args:
        parts: of each sequence of the pack. Of a part that the planned length cuts, the tokens left are filled; one
            beyond it is not encoded.
        layout: who holds which tokens.
        ranks: global ranks of the members.
        member: this rank's place among them.

    Returns:
        What waits for the pixels and returns the member's share.

    Raises:
        RunError: parts that lie beyond their sequence's start or overlap.
    """
    lengths = np.asarray(layout.lengths, dtype=np.int64)
    bases = np.cumsum(lengths) - lengths
    kept = [
        (part, base, length)
        for base, length, own in zip(bases.tolist(), lengths.tolist(), parts, strict=True)
        for part in _in_order(own)
        if part.start_token < length
    ]
    if not kept:
        return None
    encoders = share_out([part.work for part, _, _ in kept], layout.degree)
    # One row per embedding that the encoders compute, in the order of the pack's tokens.
    sizes = [part.num_tokens for part, _, _ in kept]
    tokens = np.concatenate(
        [
            base + np.arange(part.start_token, part.start_token + size)
            for (part, base, _), size in zip(kept, sizes, strict=True)
        ]
    )
    ends = np.repeat([base + length for _, base, length in kept], sizes)
    holders = np.empty(layout.total_tokens, dtype=np.int64)
    for place in range(layout.degree):
        holders[layout.index(place)] = place
    # A part that the planned length cuts is encoded whole, but no rank needs its embeddings beyond the end.
    consumers = np.where(tokens < ends, holders[np.minimum(tokens, layout.total_tokens - 1)], -1)
    kinds = np.repeat(np.array([part.kind == "video" for part, _, _ in kept]), sizes)[consumers == member]
    own = tuple((part, base) for (part, base, _), place in zip(kept, encoders.tolist(), strict=True) if place == member)
    shard = VisualShard(
        parts=tuple(part for part, _ in own),
        pixels=None,
        kinds=tuple("video" if is_video else "image" for is_video in kinds.tolist()),
        route=route(np.repeat(encoders, sizes), consumers, ranks=ranks, index=member),
    )
    begun = [
        (place, begin_reading([part for part, at in own if at == base]))
        for place, base in enumerate(bases.tolist())
        if any(at == base for _, at in own)
    ]
    return partial(_with_pixels, shard, begun)


def _with_pixels(shard: VisualShard, begun: Sequence[tuple[int, Callable[[], PixelsRead]]]) -> VisualShard:
    """Wait for the pixels of each sequence; parts stand in the order of their sequences."""
    read = [(place, wait()) for place, wait in begun]
    rows = [tensor for _, found in read for tensor in found.rows]
    problems = {place: found.problem for place, found in read if found.problem is not None}
    return replace(shard, pixels=torch.cat(rows) if rows else None, problems=problems)


def _in_order(parts: Sequence[VisualPart]) -> Sequence[VisualPart]:
    end = 0
    for part in parts:
        if part.start_token < end:
            raise RunError(
                f"the {part.kind} part at token {part.start_token} of a sequence begins before the one before it ends, "
                f"at {end}; fetch must return parts in the order of their tokens"
            )
        end = part.start_token + part.num_tokens
    return parts
