"""The images and videos of a micro-batch: which member of the ring encodes each, and whose tokens they become.

Stage 1: every member encodes some parts (an image, a pair of frames, a tile), shared out so that their work is even,
whatever tokens the member holds. Stage 2: an `exchange` takes each part's embeddings to the members that hold its
tokens. Both follow from the sequences' tokens and sizes, which all members of a ring read; pixels are read only by the
member that encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.exchange import Route, route
from fcp_cli.runtime.layout import ShardLayout
from fcp_cli.vision.parts import Kind, VisualPart, share_out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualShard:
    """One member's share of a pack's images and videos.

    Attributes:
        parts: what it encodes, in order.
        pixels: their input, [patches, ...]; None where it encodes nothing.
        kinds: kind of each of the visual tokens that it holds, in the order of its tokens.
        route: takes the embeddings of its parts [their tokens, ...] to those of its tokens [len(kinds), ...].
    """

    parts: tuple[VisualPart, ...]
    pixels: Tensor | None
    kinds: tuple[Kind, ...]
    route: Route

    def map_pixels(self, change: Callable[[Tensor], Tensor]) -> VisualShard:
        """Return the same with changed pixels: on another device, in page-locked memory."""
        return self if self.pixels is None else replace(self, pixels=change(self.pixels))


def visual_shard(
    parts: Sequence[Sequence[VisualPart]], layout: ShardLayout, *, ranks: tuple[int, ...], member: int
) -> VisualShard | None:
    """Return one member's share of a pack, with the pixels of what it encodes. None where the pack has no part.

    Args:
        parts: of each sequence of the pack. Of a part that the planned length cuts, the tokens left are filled; one
            beyond it is not encoded.
        layout: who holds which tokens.
        ranks: global ranks of the members.
        member: this rank's place among them.

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
    own = tuple(part for (part, _, _), place in zip(kept, encoders.tolist(), strict=True) if place == member)
    return VisualShard(
        parts=own,
        pixels=torch.cat([part.pixels() for part in own]) if own else None,
        kinds=tuple("video" if is_video else "image" for is_video in kinds.tolist()),
        route=route(np.repeat(encoders, sizes), consumers, ranks=ranks, index=member),
    )


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
