"""InternVL: its sequences as a plan runs them, and the calls of its encoder.

Images and frames are square tiles of one size, which the encoder sees one by one: a part is a tile, all weigh alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcp_cli.vision.grids import tiled_sequence
from fcp_cli.vision.parts import Kind, Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any, input_ids: Any, *, labels: Any = None, pixel_values: Pixels | None = None
) -> VisualSequence:
    """Make one sequence from the output of the model's processor.

    Args:
        config: the configuration of the whole model (`InternVLConfig`).
        input_ids: [tokens] with placeholders, `image_seq_length` for each tile.
        labels: [tokens], -100 if a token is not to be learned; None learns every token.
        pixel_values: the tiles [tiles, channels, height, width] of its images and frames; a function is called
            only on the rank that encodes them.
    """
    size = config.image_seq_length
    return tiled_sequence(
        input_ids,
        labels=labels,
        pixel_values=pixel_values,
        placeholder=config.image_token_id,
        tokens_per_tile=size,
        side=round(size**0.5 / config.downsample_ratio),
    )


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return [embeddings, 1, hidden] of this member's tiles; of a blank one, as small as can be, if it has none.

    Args:
        model: the `InternVLModel`.
        parts: the parts to encode; unused, since all tiles have one size.
        pixels: [tiles, channels, height, width] of all of them; None if there are none.
    """
    tower = model.vision_tower
    if pixels is None:
        side = round(1 / model.config.downsample_ratio) * model.config.vision_config.patch_size[0]
        pixels = torch.zeros(1, 3, side, side)
    found = model.get_image_features(pixels.to(tower.device, tower.dtype), return_dict=True)
    return found.pooler_output.flatten(0, 1).unsqueeze(1)  # type: ignore[no-any-return]


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the arguments of the model's forward that replace pixels.

    Args:
        embeddings: [visual tokens of this rank, 1, hidden].
        kinds: the kinds of each; all are images here.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return {"image": BaseModelOutputWithPooling(pooler_output=embeddings.transpose(0, 1))}
