"""Tokens after each token of a shard, one to a few positions ahead, for multi-token prediction.

The next tokens of a rank's tokens lie with other ranks where a chunk ends. Every rank reads its sequences whole, so it
takes them from there, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """A shard's values 1, 2, ... places ahead, within their sequences; 0 where those have ended.

    Attributes:
        values: the values by name, [places, ..., tokens].
        ratio: [places, tokens], of a token's sequence: tokens with a loss / tokens with a loss so many places ahead.
        counts: tokens with a loss 0, 1, 2, ... places ahead, in the mean of the row's sequences.
    """

    values: Mapping[str, Tensor]
    ratio: Tensor
    counts: tuple[float, ...]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Ahead:
        """Return the same with every tensor replaced: pinned, or moved to a device."""
        values = {name: function(tensor) for name, tensor in self.values.items()}
        return replace(self, values=values, ratio=function(self.ratio))


def look_ahead(
    items: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    mask: str,
    places: int,
    shard_of: Callable[[Sequence[Tensor]], Tensor],
) -> Ahead:
    """Return the tokens after those of a shard.

    Args:
        items: the row's sequences, whole.
        names: the names of the values wanted; items that lack one have none ahead, either.
        mask: name of the loss mask; without one every token has a loss.
        places: how many to look ahead.
        shard_of: cuts a shard out of whole sequences.
    """
    masks = [item[mask] if mask in item else torch.ones(next(iter(item.values())).shape[-1]) for item in items]
    counts = [[float(_moved(one, place).sum()) for one in masks] for place in range(places + 1)]
    # At least 1: a sequence too short to have a loss so far ahead gets a weight, but none of its tokens counts.
    ratios = [
        [one.new_full(one.shape, own / max(ahead, 1.0)) for one, own, ahead in zip(masks, counts[0], row, strict=True)]
        for row in counts[1:]
    ]
    values = {
        name: torch.stack([shard_of([_moved(item[name], place + 1) for item in items]) for place in range(places)])
        for name in names
        if name in items[0]
    }
    ratio = torch.stack([shard_of(row) for row in ratios])
    return Ahead(values=values, ratio=ratio, counts=tuple(sum(row) / len(items) for row in counts))


def _moved(tensor: Tensor, places: int) -> Tensor:
    """Shift a sequence's per-token values so many positions towards its beginning."""
    return pad(tensor[..., places:], (0, min(places, tensor.shape[-1])))
