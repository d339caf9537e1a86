"""Images and videos of a micro-batch: the rank that encodes each, and the ranks that hold its tokens.

Stage 1: every rank encodes some parts (an image, a pair of frames, a tile), balanced by work and independent of the
rank's tokens. Stage 2: an `exchange` sends each part's embeddings to the ranks that hold its tokens. Both follow from
the sequences' tokens and sizes, which all ranks that balance the work read. Pixels are only read by the rank that
encodes them.

The work is balanced over the members of one ring, or over all ranks of a wave, given the packs of all its rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.exchange import Route, exchange, route
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.layout import ShardLayout
from fcp_cli.runtime.transport import Transport
from fcp_cli.util.arrays import IntArray
from fcp_cli.vision.parts import Kind, PixelsRead, VisualPart, balanced_encoders, begin_reading


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualShard:
    """One member's share of a pack's images and videos.

    Attributes:
        parts: parts to encode, in order.
        pixels: their input [patches, ...], or None if it encodes nothing.
        kinds: kind of each visual token that it holds, in token order.
        route: sends the embeddings of its parts [their tokens, ...] and receives those of its tokens [len(kinds), ...].
        problems: decoding error by manifest row, for sequences whose images failed to decode and are blank.
    """

    parts: tuple[VisualPart, ...]
    pixels: Tensor | None
    kinds: tuple[Kind, ...]
    route: Route
    problems: Mapping[int, str] = field(default_factory=dict)

    def map_pixels(self, change: Callable[[Tensor], Tensor]) -> VisualShard:
        """Return the shard with `change` applied to its pixels, e.g. to copy or pin them."""
        return self if self.pixels is None else replace(self, pixels=change(self.pixels))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualPack:
    """Pack from the view of the encoder's load balancing.

    Attributes:
        parts: parts of each sequence. A part cut by the planned length fills the remaining tokens; one beyond it is not
            encoded.
        rows: manifest row of each sequence.
        layout: tokens of each member.
        ranks: global ranks of the members.
    """

    parts: Sequence[Sequence[VisualPart]]
    rows: Sequence[int]
    layout: ShardLayout
    ranks: tuple[int, ...]

    def kept(self) -> Iterator[tuple[VisualPart, int, int, int]]:
        """Yield (part, start of its sequence in the pack, end of its sequence, manifest row) of the parts to encode."""
        base = 0
        for length, own, row in zip(self.layout.lengths, self.parts, self.rows, strict=True):
            for part in _in_order(own):
                if part.start_token < length:
                    yield part, base, base + length, row
            base += length

    def holders(self) -> IntArray:
        """Return the member that holds each token, [tokens]."""
        holders = np.empty(self.layout.total_tokens, dtype=np.int64)
        for place in range(self.layout.degree):
            holders[self.layout.index(place)] = place
        return holders


def begin_visual_shard(
    packs: Sequence[VisualPack], *, rank: int, encoders: Sequence[int] = ()
) -> Callable[[], VisualShard] | None:
    """Start to read the pixels that one rank encodes; return None if no pack has images.

    Args:
        packs: packs of all rings whose ranks balance the work, in the same order on all of them; no rank is in two.
        rank: global rank.
        encoders: global ranks that encode, among those of the packs; empty if all do.

    Returns:
        A function that waits for the pixels and returns the rank's share.
    """
    ranks = tuple(chain.from_iterable(pack.ranks for pack in packs))
    index = ranks.index(rank)
    kept: list[tuple[VisualPart, int]] = []
    consumers: list[IntArray] = []
    homes: list[range] = []
    first = 0  # index of the pack's first member among all ranks
    for pack in packs:
        found = list(pack.kept())
        holders = pack.holders() if found else np.empty(0, dtype=np.int64)
        for part, base, end, row in found:
            kept.append((part, row))
            homes.append(range(first, first + len(pack.ranks)))
            # A part cut by the planned length is encoded whole, but no rank needs its embeddings beyond the end.
            tokens = base + np.arange(part.start_token, part.start_token + part.num_tokens)
            consumers.append(np.where(tokens < end, first + holders[np.minimum(tokens, len(holders) - 1)], -1))
        first += len(pack.ranks)
    if not kept:
        return None
    work = [part.work for part, _ in kept]
    if encoders:
        places = np.array([ranks.index(one) for one in encoders])[balanced_encoders(work, len(encoders))]
    else:
        places = balanced_encoders(work, len(ranks), homes if len(packs) > 1 else None)
    # One row per computed embedding, in token order of the packs.
    sizes = [part.num_tokens for part, _ in kept]
    needed = np.concatenate(consumers)
    kinds = np.repeat(np.array([part.kind == "video" for part, _ in kept]), sizes)[needed == index]
    own = [found for found, place in zip(kept, places.tolist(), strict=True) if place == index]
    shard = VisualShard(
        parts=tuple(part for part, _ in own),
        pixels=None,
        kinds=tuple("video" if is_video else "image" for is_video in kinds.tolist()),
        route=route(np.repeat(places, sizes), needed, ranks=ranks, index=index),
    )
    begun = [(row, begin_reading([part for part, _ in of_row])) for row, of_row in groupby(own, key=lambda one: one[1])]
    return partial(_with_pixels, shard, begun)


def _with_pixels(shard: VisualShard, begun: Sequence[tuple[int, Callable[[], PixelsRead]]]) -> VisualShard:
    """Wait for the pixels of each sequence; `begun` has them by manifest row, in the order of the parts."""
    read = [(row, wait()) for row, wait in begun]
    pixels = [tensor for _, found in read for tensor in found.rows]
    problems = {row: found.problem for row, found in read if found.problem is not None}
    return replace(shard, pixels=torch.cat(pixels) if pixels else None, problems=problems)


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


# Dedicated encoder rank: sends a wave's embeddings, and encodes the next wave while others run the language model.
#
# Messages are in the same order as on every other rank, so no cycle of waits can form: embeddings of a wave, its
# gradients, embeddings of the next. In between the rank computes: first the next wave's forward, which the others
# wait for, then the backward of the previous wave, whose gradients have arrived.

Encode = Callable[[VisualShard | None], Tensor]


class EncoderAhead:
    """Encoder of one step on a dedicated encoder rank.

    Args:
        visuals: images of the step's micro-batches, on the device, in order; None for a wave without images.
    """

    def __init__(self, visuals: list[VisualShard | None]) -> None:
        self._visuals = visuals
        self._next = 0
        self._ready: Tensor | None = None
        self._sent: tuple[Tensor, Tensor] | None = None  # embeddings, and the leaf that gets their gradient

    def bring(self, encode: Encode, transport: Transport | None) -> Tensor:
        """Send the embeddings of the next micro-batch [its parts' tokens, ...], and encode those of the one after it.

        Returns:
            An empty tensor, through whose graph the embeddings' gradients arrive.
        """
        number, self._next = self._next, self._next + 1
        own = encode(self._visuals[number]) if self._ready is None else self._ready
        visuals = self._visuals[number]
        leaf = own.detach().requires_grad_(own.requires_grad)
        arrived = leaf[:0] if visuals is None else exchange(leaf, visuals.route, transport)
        is_last = self._next == len(self._visuals)
        self._ready = None if is_last else encode(self._visuals[self._next])
        self.run_backward()
        self._sent = (own, leaf) if own.requires_grad else None
        return arrived

    def run_backward(self) -> None:
        """Run the encoder's backward of the last sent embeddings, if it is trained and their gradients have arrived."""
        if self._sent is not None:
            own, leaf = self._sent
            torch.autograd.backward(own, torch.zeros_like(own) if leaf.grad is None else leaf.grad)
            self._sent = None


def require_ranks_apart(sync: GradientSync, encoder_ranks: int | None) -> None:
    """Raise RunError if the plan has encoder ranks but the model wrapper needs all ranks to run in step."""
    if encoder_ranks and not sync.lets_ranks_run_apart:
        raise RunError(
            "under a plan with encoder ranks these run ahead of the others, which DistributedDataParallel, FSDP2 and "
            "DeepSpeed do not allow; give session.steps the plain model (fcp launch --zero 0 or 1), or plan without "
            "--encoder-ranks"
        )
