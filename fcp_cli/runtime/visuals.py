"""Images and videos of a micro-batch: which member of the ring encodes what, and whose tokens that becomes.

Stage 1: every member encodes some parts (an image, a pair of frames, a tile), shared out so that their work is even,
whatever tokens the member holds. Stage 2: an `exchange` takes each part's embeddings to the members that hold its
tokens. Both follow from the sequences' tokens and sizes, which all members of a ring read; pixels are read only by the
member that encodes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.exchange import Route, route
from fcp_cli.runtime.layout import IntArray, ShardLayout

FloatArray: TypeAlias = npt.NDArray[np.float64]

Kind = Literal["image", "video"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualPart:
    """The smallest piece of an image or a video that the encoder can run alone: an image, a pair of frames, a tile.

    Attributes:
        kind: which placeholder its tokens have.
        start_token: position of the first of its tokens in the sequence.
        num_tokens: how many it has, all together.
        work: of the encoder for it, in any unit that all parts share.
        grid: height and width in patches.
        pixels: gives the encoder's input for it, [patches, ...]; called ahead of time in a background thread, and only
            on the rank that encodes it.
    """

    kind: Kind
    start_token: int
    num_tokens: int
    work: float
    grid: tuple[int, int]
    pixels: Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisualSequence:
    """One sequence with images or videos, as `fetch` returns it.

    Attributes:
        tokens: [tokens] ids, with placeholders where visual embeddings go.
        labels: [tokens] as Hugging Face data sets have them, or None to learn every token.
        parts: the pieces of its images and videos, in the order of their tokens; may be empty.
        position_ids: [axes, tokens] where the model's positions are not 0, 1, 2, ...
    """

    tokens: Any
    labels: Any = None
    parts: tuple[VisualPart, ...] = ()
    position_ids: IntArray | None = None


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
        """The same with changed pixels: on another device, in page-locked memory."""
        return self if self.pixels is None else replace(self, pixels=change(self.pixels))


def visual_shard(
    parts: Sequence[Sequence[VisualPart]], layout: ShardLayout, *, ranks: tuple[int, ...], member: int
) -> VisualShard | None:
    """One member's share of a pack; reads the pixels of what it encodes. None where the pack has no part.

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
    consumers = np.where(tokens < ends, holders[np.minimum(tokens, layout.total_tokens - 1)], -1)
    kinds = np.repeat(np.array([part.kind == "video" for part, _, _ in kept]), sizes)[consumers == member]
    own = tuple(part for (part, _, _), place in zip(kept, encoders.tolist(), strict=True) if place == member)
    return VisualShard(
        parts=own,
        pixels=torch.cat([part.pixels() for part in own]) if own else None,
        kinds=tuple("video" if is_video else "image" for is_video in kinds.tolist()),
        route=route(np.repeat(encoders, sizes), consumers, ranks=ranks, index=member),
    )


def share_out(work: Sequence[float], members: int) -> IntArray:
    """[parts] who encodes each part; the same on every rank that asks.

    The heaviest first, each to whoever has least so far: the most loaded member then has at most 4/3 - 1/(3 members) of
    the least possible (Graham, 1969). Then it shares its parts and those of another member out anew between the two, as
    evenly as can be, as long as that makes the most loaded one end earlier.
    """
    encoders = _largest_first(work, members)
    weights = np.asarray(work, dtype=np.float64)
    loads = np.bincount(encoders, weights=weights, minlength=members)
    for _ in range(_MOST_ROUNDS_PER_MEMBER * members):
        heaviest = int(loads.argmax())
        if loads[heaviest] <= _EVEN_ENOUGH * loads.mean():
            break
        least, best = loads[heaviest] * (1 - 1e-9), None
        for other in np.flatnonzero(np.arange(members) != heaviest).tolist():
            both = np.flatnonzero((encoders == heaviest) | (encoders == other))
            half = both[_half_of(weights[both])]
            larger = max(weights[half].sum(), weights[both].sum() - weights[half].sum())
            if larger < least:
                least, best = larger, (other, both, half)
        if best is None:
            break
        other, both, half = best
        encoders[both] = heaviest
        encoders[half] = other
        loads = np.bincount(encoders, weights=weights, minlength=members)
    return encoders


_EVEN_ENOUGH = 1.01  # largest over mean load at which sharing out anew ends
_MOST_ROUNDS_PER_MEMBER = 8
_LEVELS = 4096  # a half is sought among so many sums


def _largest_first(work: Sequence[float], members: int) -> IntArray:
    loads = [(0.0, member) for member in range(members)]
    heapify(loads)
    encoders = np.empty(len(work), dtype=np.int64)
    for part in sorted(range(len(work)), key=lambda i: -work[i]):
        load, member = loads[0]
        encoders[part] = member
        heapreplace(loads, (load + work[part], member))
    return encoders


def _half_of(weights: FloatArray) -> list[int]:
    """Which of the weights come closest to half of their sum: all sums that some of them have are the bits of a number.

    Weights are rounded to 1/4096 of their sum.
    """
    rounded = np.rint(weights * (_LEVELS / weights.sum())).astype(np.int64).tolist()
    sums = [1]
    for weight in rounded:
        sums.append(sums[-1] | sums[-1] << weight)
    wanted = (sums[-1] & (2 << sum(rounded) // 2) - 1).bit_length() - 1
    chosen = []
    for position in range(len(rounded) - 1, -1, -1):
        if not sums[position] >> wanted & 1:
            chosen.append(position)
            wanted -= rounded[position]
    return chosen


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
