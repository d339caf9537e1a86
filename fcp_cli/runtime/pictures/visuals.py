"""The images and videos of a micro-batch: which rank encodes each, and whose tokens they become.

Stage 1: every rank encodes some parts (an image, a pair of frames, a tile), shared out so that their work is even,
independent of the rank's tokens. Stage 2: an `exchange` takes each part's embeddings to the ranks that hold its
tokens. Both follow from the sequences' tokens and sizes, which all ranks that share the work read; pixels are read only
by the rank that encodes them.

The work is shared by the members of one ring, or by all ranks of a wave: then the packs of all its rings are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.runtime.communication.row_exchange import Route, route
from fcp_cli.runtime.layouts.layout import ShardLayout
from fcp_cli.runtime.pictures.embedding_cache import CachedRows, EmbeddingCache
from fcp_cli.vision.parts import Kind, PixelsRead, VisualPart, balanced_encoders, begin_reading


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualShard:
    """One member's share of a pack's images and videos.

    Attributes:
        parts: the parts to encode, in order.
        cached: embeddings of further parts that it need not compute, and where they belong; None if there are none.
        keys: the keys of `parts`, under which their embeddings are kept; None of those that are not, empty if nothing
            is.
        pixels: their input, [patches, ...]; None if it encodes nothing.
        kinds: kind of each of the visual tokens that it holds, in the order of its tokens.
        route: takes the embeddings of its parts [their tokens, ...] to those of its tokens [len(kinds), ...].
        problems: why the pictures of a sequence could not be read, by its row of the data; they are blank then.
    """

    parts: tuple[VisualPart, ...]
    pixels: Tensor | None
    kinds: tuple[Kind, ...]
    route: Route
    problems: Mapping[int, str] = field(default_factory=dict)
    cached: CachedRows | None = None
    keys: tuple[str | None, ...] = ()

    def map_pixels(self, change: Callable[[Tensor], Tensor]) -> VisualShard:
        """Return the same with changed pixels: on another device, in page-locked memory."""
        return self if self.pixels is None else replace(self, pixels=change(self.pixels))

    def embeddings(self, computed: Tensor, cache: EmbeddingCache | None) -> Tensor:
        """Return the embeddings of all of this rank's parts, and cache new ones.

        Args:
            computed: the embeddings of `parts` [their tokens, ...]; of a blank patch if there are none.
            cache: the cache to keep them in, or None.
        """
        if cache is not None and self.parts:
            cache.write(self.keys, torch.split(computed, [part.num_tokens for part in self.parts]))
        return computed if self.cached is None else self.cached.joined_with(computed)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualPack:
    """A pack as the sharing out of its pictures sees it.

    Attributes:
        parts: the parts of each sequence. Of a part that the planned length cuts, the tokens left are filled; one
            beyond it is not encoded.
        rows: the rows of each sequence, its row of the data.
        layout: who holds which tokens.
        ranks: global ranks of the members.
    """

    parts: Sequence[Sequence[VisualPart]]
    rows: Sequence[int]
    layout: ShardLayout
    ranks: tuple[int, ...]

    def kept(self) -> Iterator[tuple[VisualPart, int, int, int]]:
        """Yield the parts that are encoded: with their sequence's first token and end in the pack, and its row."""
        base = 0
        for length, own, row in zip(self.layout.lengths, self.parts, self.rows, strict=True):
            for part in _in_order(own):
                if part.start_token < length:
                    yield part, base, base + length, row
            base += length

    def holders(self) -> IntArray:
        """Return [tokens] the member that holds each token."""
        holders = np.empty(self.layout.total_tokens, dtype=np.int64)
        for place in range(self.layout.degree):
            holders[self.layout.index(place)] = place
        return holders


def begin_visual_shard(
    packs: Sequence[VisualPack], *, rank: int, cache: EmbeddingCache | None = None, encoders: Sequence[int] = ()
) -> Callable[[], VisualShard] | None:
    """Begin to read the pixels that one rank encodes; None if there is no part.

    Args:
        packs: the packs of all rings whose ranks share the work, in an order that is the same on all of them; no rank
            is in two.
        rank: global rank.
        cache: the cache of embeddings that are not to be computed again; None: there is none.
        encoders: global ranks that encode, among those of the packs; none: all of them do.

    Returns:
        A function that waits for the pixels and returns the rank's share.
    """
    ranks = tuple(chain.from_iterable(pack.ranks for pack in packs))
    index = ranks.index(rank)
    kept: list[tuple[VisualPart, int]] = []
    consumers: list[IntArray] = []
    homes: list[range] = []
    first = 0  # place of the pack's first member among all ranks
    for pack in packs:
        found = list(pack.kept())
        holders = pack.holders() if found else np.empty(0, dtype=np.int64)
        for part, base, end, row in found:
            kept.append((part, row))
            homes.append(range(first, first + len(pack.ranks)))
            # A part that the planned length cuts is encoded whole, but no rank needs its embeddings beyond the end.
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
    # One row per embedding that the encoders compute, in the order of the packs' tokens.
    sizes = [part.num_tokens for part, _ in kept]
    needed = np.concatenate(consumers)
    kinds = np.repeat(np.array([part.kind == "video" for part, _ in kept]), sizes)[needed == index]
    own = [found for found, place in zip(kept, places.tolist(), strict=True) if place == index]
    own, cached, keys = _looked_up(own, cache)
    shard = VisualShard(
        parts=tuple(part for part, _ in own),
        cached=cached,
        keys=keys,
        pixels=None,
        kinds=tuple("video" if is_video else "image" for is_video in kinds.tolist()),
        route=route(np.repeat(places, sizes), needed, ranks=ranks, index=index),
    )
    begun = [(row, begin_reading([part for part, _ in of_row])) for row, of_row in groupby(own, key=lambda one: one[1])]
    return partial(_with_pixels, shard, begun, [row for _, row in own])


_Parts: TypeAlias = list[tuple[VisualPart, int]]


def _looked_up(own: _Parts, cache: EmbeddingCache | None) -> tuple[_Parts, CachedRows | None, tuple[str | None, ...]]:
    """Divide a rank's parts: the ones to encode, the embeddings of the others, and the keys of the former."""
    if cache is None:
        return own, None, ()
    keys = [_key_of(part, cache) for part, _ in own]
    found = [None if key is None else cache.read(key) for key in keys]
    missing = [number for number, rows in enumerate(found) if rows is None]
    kept = [rows for rows in found if rows is not None]
    cached = None
    if kept:
        sizes = [part.num_tokens for part, _ in own]
        is_kept = np.repeat([rows is not None for rows in found], sizes)
        # Computed ones come first, each kind in its own order.
        order = np.empty(len(is_kept), dtype=np.int64)
        order[np.argsort(is_kept, kind="stable")] = np.arange(len(is_kept))
        cached = CachedRows(rows=torch.cat(kept), order=torch.from_numpy(order))
    return [own[number] for number in missing], cached, tuple(keys[number] for number in missing)


def _key_of(part: VisualPart, cache: EmbeddingCache) -> str | None:
    try:
        return cache.key(part)
    except RunError:  # a bad picture: reading its pixels reports it
        return None


def _with_pixels(
    shard: VisualShard, begun: Sequence[tuple[int, Callable[[], PixelsRead]]], rows: Sequence[int]
) -> VisualShard:
    """Wait for the pixels of each sequence; parts are in the order of their sequences, whose rows are given."""
    read = [(row, wait()) for row, wait in begun]
    pixels = [tensor for _, found in read for tensor in found.rows]
    problems = {row: found.problem for row, found in read if found.problem is not None}
    keys = tuple(None if row in problems else key for key, row in zip(shard.keys, rows, strict=False))
    return replace(shard, pixels=torch.cat(pixels) if pixels else None, problems=problems, keys=keys)


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
