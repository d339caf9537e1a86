"""InternVL: its sequences as a plan runs them, and the calls of its encoder.

Images and frames are square tiles of one size, which the encoder sees one by one: a part is a tile, all weigh alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.vision.parts import Kind, PixelReader, PixelRows, Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any, input_ids: Any, *, labels: Any = None, pixel_values: Pixels | None = None
) -> VisualSequence:
    """Make one sequence of what the model's processor returns for it.

    Args:
        config: of the whole model (`InternVLConfig`).
        input_ids: [tokens] with placeholders, `image_seq_length` for each tile.
        labels: [tokens], -100 where a token is not to be learned; None learns every token.
        pixel_values: the tiles [tiles, channels, height, width] of its images and frames; a function is called
            only on the rank that encodes them.

    Raises:
        RunError: placeholders that do not fit the tiles.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    places = np.flatnonzero(ids == config.image_token_id)
    size = config.image_seq_length
    tiles, rest = divmod(len(places), size)
    is_asked = pixel_values is None or callable(pixel_values) or isinstance(pixel_values, PixelReader)
    given = tiles if is_asked else len(pixel_values)  # type: ignore[arg-type]
    if rest or given != tiles or (tiles and pixel_values is None):
        raise RunError(
            f"a sequence has {len(places)} placeholders (token {config.image_token_id}), {size} for each tile, but "
            f"{'no' if pixel_values is None else given} tiles; give the processor's pixel_values of this very sequence"
        )
    starts = places[::size]
    apart = np.flatnonzero(places[size - 1 :: size] - starts != size - 1)
    if len(apart):
        raise RunError(f"the {size} placeholders from token {starts[apart[0]]} on are not all together")
    side = round(size**0.5 / config.downsample_ratio)
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


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return [embeddings, 1, hidden] of this member's tiles; of a blank one, as small as can be, where it has none.

    Args:
        model: the `InternVLModel`.
        parts: what to encode; all tiles are of one size, so nothing of them is needed.
        pixels: [tiles, channels, height, width] of all of them; None where there are none.
    """
    tower = model.vision_tower
    if pixels is None:
        side = round(1 / model.config.downsample_ratio) * model.config.vision_config.patch_size[0]
        pixels = torch.zeros(1, 3, side, side)
    found = model.get_image_features(pixels.to(tower.device, tower.dtype), return_dict=True)
    return found.pooler_output.flatten(0, 1).unsqueeze(1)  # type: ignore[no-any-return]


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return what the model's forward takes in place of pixels.

    Args:
        embeddings: [visual tokens of this rank, 1, hidden].
        kinds: of each; all are images here.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return {"image": BaseModelOutputWithPooling(pooler_output=embeddings.transpose(0, 1))}
