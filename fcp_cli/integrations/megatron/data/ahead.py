"""Following tokens of a shard, for multi-token prediction.

At the end of a chunk, the following tokens belong to other ranks. Every rank reads whole sequences, so it takes them
from there, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """A shard's per-token values 1, 2, ... places ahead in their sequence; 0 beyond its end.

    Attributes:
        values: values by name, [places, ..., tokens].
        ratio: [places, tokens], per sequence: (tokens with a loss) / (tokens with a loss that many places ahead).
        counts: mean tokens with a loss 0, 1, 2, ... places ahead, per sequence of the row.
    """

    values: Mapping[str, Tensor]
    ratio: Tensor
    counts: tuple[float, ...]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Ahead:
        """Apply a function (pin, or move to a device) to every tensor."""
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
        items: whole sequences of the row.
        names: names of the wanted values; missing ones are skipped.
        mask: name of the loss mask; without one, every token has a loss.
        places: number of places to look ahead.
        shard_of: slices the shard out of whole sequences.
    """
    masks = [item[mask] if mask in item else torch.ones(next(iter(item.values())).shape[-1]) for item in items]
    counts = [[float(_moved(one, place).sum()) for one in masks] for place in range(places + 1)]
    # At least 1, for sequences too short to have a loss that far ahead; their weight is unused.
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
    """Shift per-token values towards the beginning of the sequence, padding with zeros."""
    return pad(tensor[..., places:], (0, min(places, tensor.shape[-1])))
