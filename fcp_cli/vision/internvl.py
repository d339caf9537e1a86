"""InternVL: builds sequences for a plan, and calls the vision encoder.

Images and frames are equal-sized square tiles, which are encoded independently: each tile is a part of equal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcp_cli.vision.grids import encoder_outputs as encoder_outputs
from fcp_cli.vision.grids import tiled_sequence
from fcp_cli.vision.parts import Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any, input_ids: Any, *, labels: Any = None, pixel_values: Pixels | None = None
) -> VisualSequence:
    """Build a sequence from the output of the model's processor.

    Args:
        config: configuration of the full model (`InternVLConfig`).
        input_ids: [tokens] with `image_seq_length` placeholders per tile.
        labels: [tokens], -100 for tokens not trained; None trains every token.
        pixel_values: [tiles, channels, height, width]; a function is called only on the encoding rank.
    """
    tokens_per_tile = config.image_seq_length
    return tiled_sequence(
        input_ids,
        labels=labels,
        pixel_values=pixel_values,
        placeholder=config.image_token_id,
        tokens_per_tile=tokens_per_tile,
        side=round(tokens_per_tile**0.5 / config.downsample_ratio),
    )


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return the embeddings [embeddings, 1, hidden] of this rank's tiles, or of a tiny blank tile if it has none.

    The blank tile makes DDP and FSDP hooks run on every rank; its embeddings are not used.

    Args:
        model: the `InternVLModel`.
        parts: parts to encode; unused, since all tiles have the same size.
        pixels: [tiles, channels, height, width]; None if there are none.
    """
    tower = model.vision_tower
    if pixels is None:
        side = round(1 / model.config.downsample_ratio) * model.config.vision_config.patch_size[0]
        pixels = torch.zeros(1, 3, side, side)
    outputs = model.get_image_features(pixels.to(tower.device, tower.dtype), return_dict=True)
    return outputs.pooler_output.flatten(0, 1).unsqueeze(1)  # type: ignore[no-any-return]
