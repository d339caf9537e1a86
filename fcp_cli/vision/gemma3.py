"""Gemma 3: builds sequences for a plan, and calls the vision encoder.

Images, and crops from pan and scan, are squares of equal size, which the encoder (SigLIP) processes independently. The
tokens of an image attend to each other bidirectionally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fcp_cli.util.masks import token_types
from fcp_cli.vision.grids import encoder_outputs as encoder_outputs
from fcp_cli.vision.grids import tiled_sequence
from fcp_cli.vision.parts import Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any, input_ids: Any, *, labels: Any = None, pixel_values: Pixels | None = None
) -> VisualSequence:
    """Build a sequence from the output of the model's processor, with a mask by token type.

    Args:
        config: configuration of the full model (`Gemma3Config`).
        input_ids: [tokens] with `mm_tokens_per_image` placeholders per image or crop.
        labels: [tokens], -100 for tokens not trained; None trains every token.
        pixel_values: [images and crops, channels, height, width]; a function is called only on the encoding rank.
    """
    made = tiled_sequence(
        input_ids,
        labels=labels,
        pixel_values=pixel_values,
        placeholder=config.image_token_id,
        tokens_per_tile=config.mm_tokens_per_image,
        side=_side(config),
    )
    return replace(made, mask=token_types(made.tokens == config.image_token_id))


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return the embeddings [embeddings, 1, hidden] of this rank's images, or of a blank image if it has none.

    The blank image makes DDP and FSDP hooks run on every rank; its embeddings are not used.

    Args:
        model: the `Gemma3Model`.
        parts: parts to encode; unused, since all have the same size.
        pixels: [images, channels, height, width]; None if there are none.
    """
    tower, config = model.vision_tower, model.config
    if pixels is None:
        # Encode a single patch and repeat it to a full image, which the projector needs.
        size = config.vision_config.patch_size
        blank = torch.zeros(1, 3, size, size, dtype=tower.dtype, device=tower.device)
        patch = tower(blank, interpolate_pos_encoding=True, return_dict=True).last_hidden_state
        found = model.multi_modal_projector(patch.expand(-1, _side(config) ** 2, -1))
    else:
        found = model.get_image_features(pixels.to(tower.device, tower.dtype), return_dict=True).pooler_output
    return found.flatten(0, 1).unsqueeze(1)  # type: ignore[no-any-return]


def _side(config: Any) -> int:
    """Return the number of patches along an image's side."""
    return int(config.vision_config.image_size // config.vision_config.patch_size)
