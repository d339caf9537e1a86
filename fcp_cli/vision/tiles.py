"""Sequences of models whose encoder sees squares of one size, one by one: a part is a tile, and all weigh alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from fcp_cli.errors import RunError
from fcp_cli.vision.parts import PixelReader, PixelRows, Pixels, VisualPart, VisualSequence


def tiled_sequence(
    input_ids: Any, *, labels: Any, pixel_values: Pixels | None, placeholder: int, tokens_per_tile: int, side: int
) -> VisualSequence:
    """Make one sequence from the output of the model's processor.

    Args:
        input_ids: [tokens] with placeholders, `tokens_per_tile` for each tile.
        labels: [tokens], -100 if a token is not to be learned; None learns every token.
        pixel_values: the tiles [tiles, channels, height, width]; a function is called only on the rank that encodes
            them.
        placeholder: token of images.
        tokens_per_tile: the tokens per tile that a tile becomes.
        side: the side of a tile, in patches.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    places = np.flatnonzero(ids == placeholder)
    size = tokens_per_tile
    tiles, rest = divmod(len(places), size)
    is_asked = pixel_values is None or callable(pixel_values) or isinstance(pixel_values, PixelReader)
    given = tiles if is_asked else len(pixel_values)  # type: ignore[arg-type]
    if rest or given != tiles or (tiles and pixel_values is None):
        raise RunError(
            f"a sequence has {len(places)} placeholders (token {placeholder}), {size} for each tile, but "
            f"{'no' if pixel_values is None else given} tiles; give the processor's pixel_values of this very sequence"
        )
    starts = places[::size]
    apart = np.flatnonzero(places[size - 1 :: size] - starts != size - 1)
    if len(apart):
        raise RunError(f"the {size} placeholders from token {starts[apart[0]]} on are not all together")
    return VisualSequence(
        tokens=ids,
        labels=labels,
        parts=tuple(
            VisualPart(
                kind="image",
                start_token=start,
                num_tokens=size,
                work=1.0,
                grid=(side, side),
                pixels=PixelRows(pixel_values, number, number + 1),
            )
            for number, start in enumerate(starts.tolist())
            if pixel_values is not None
        ),
    )
