"""Gemma 4: builds sequences with images for a plan, and calls the vision encoder.

An image is a patch grid of any shape; the processor pads it to the patch count of the largest image. Depending on the
checkpoint's configuration, tokens of an image attend to each other bidirectionally in windowed layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.masks import CAUSAL, token_types
from fcp_cli.vision.grids import image_parts
from fcp_cli.vision.parts import Kind, Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any,
    input_ids: Any,
    *,
    labels: Any = None,
    pixel_values: Pixels | None = None,
    image_position_ids: Any = None,
) -> VisualSequence:
    """Build a sequence from the output of the model's processor, with a mask for its images.

    Args:
        config: configuration of the full model (`Gemma4Config`).
        input_ids: [tokens] with a placeholder per pooled square of patches.
        labels: [tokens], -100 for tokens not trained; None trains every token.
        pixel_values: [images, max patches, values]; a function is called only on the encoding rank.
        image_position_ids: [images, max patches, 2] column and row of each patch, -1 for padding.

    Raises:
        RunError: placeholders and images do not match, or there is video or audio.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    for other in ("video", "audio"):
        if (ids == getattr(config, f"{other}_token_id", None)).any():
            raise RunError(f"a sequence has {other} placeholders; with Gemma 4, a plan supports text and images only")
    is_image = ids == config.image_token_id
    places, grids = np.flatnonzero(is_image), _grids(image_position_ids)
    area = config.vision_config.pooling_kernel_size**2
    tokens = [height * width // area for height, width in grids]
    if sum(tokens) != len(places) or (tokens and pixel_values is None):
        raise RunError(
            f"a sequence has {len(places)} image placeholders (token {config.image_token_id}), but its "
            f"{len(tokens)} images make {sum(tokens)} tokens{'' if pixel_values is not None else ', without pixels'}; "
            "give the processor's pixel_values and image_position_ids of this sequence"
        )
    images = [(grid, size, _work(config.vision_config, *grid)) for grid, size in zip(grids, tokens, strict=True)]
    both_ways = config.get_text_config().use_bidirectional_attention == "vision"
    return VisualSequence(
        tokens=ids,
        labels=labels,
        parts=image_parts(places, images, pixel_values, words="image placeholders"),
        mask=token_types(is_image, windows_only=True) if both_ways and len(places) else CAUSAL,
    )


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return the embeddings [embeddings, 1, hidden] of this rank's images, or of a tiny blank image if it has none.

    The blank image makes DDP and FSDP hooks run on every rank; its embeddings are not used.

    Args:
        model: the `Gemma4Model`.
        parts: the parts to encode.
        pixels: [images, max patches, values]; None if there are none.
    """
    vision, tower = model.config.vision_config, model.vision_tower
    side = vision.pooling_kernel_size
    grids = [part.grid for part in parts] or [(side, side)]
    if pixels is None:
        pixels = torch.zeros(1, side * side, 3 * vision.patch_size**2)
    positions = torch.from_numpy(position_ids(grids))
    most = positions.shape[1]  # of these images; the processor may pad further
    found = model.get_image_features(
        pixels[:, :most].to(tower.device, tower.dtype), positions.to(tower.device), return_dict=True
    )
    return torch.cat(found.pooler_output).unsqueeze(1)


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the arguments of the model's forward that replace pixels.

    Args:
        embeddings: [visual tokens of this rank, 1, hidden].
        kinds: kind of each token; all are images here.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    of_each: Any = (embeddings.squeeze(1),)  # transformers has a tuple with a tensor per image
    return {"image": BaseModelOutputWithPooling(pooler_output=of_each)}


def position_ids(grids: Sequence[tuple[int, int]]) -> IntArray:
    """Return position ids [images, max patches, 2] as the processor does, for images of (height, width) patches."""
    found = np.full((len(grids), max((height * width for height, width in grids), default=0), 2), -1)
    for own, grid in zip(found, grids, strict=True):
        own[: grid[0] * grid[1]] = _positions(*grid)
    return found


def _grids(image_position_ids: Any) -> list[tuple[int, int]]:
    """Return (height, width) of each image in patches; RunError unless patches are in row-major order."""
    found = []
    for number, of_image in enumerate([] if image_position_ids is None else np.asarray(image_position_ids)):
        width, height = (int(side) + 1 for side in of_image.max(axis=0))
        patches = of_image[: height * width]
        if not np.array_equal(patches, _positions(height, width)) or (of_image[height * width :] != -1).any():
            raise RunError(
                f"the image_position_ids of image {number} are not those of {height} rows of {width} patches, "
                "followed by padding; pass the processor's output"
            )
        found.append((height, width))
    return found


def _positions(height: int, width: int) -> IntArray:
    """Return the column and row of each patch in row-major order: [patches, 2]."""
    return np.stack((np.tile(np.arange(width), height), np.repeat(np.arange(height), width)), axis=1)


def _work(vision: Any, height: int, width: int) -> float:
    """Count multiplications of an encoder layer: seven matrix products per patch, two of attention per pair."""
    patches = height * width
    hidden: int = vision.hidden_size
    return float(patches * hidden * (4 * hidden + 3 * vision.intermediate_size + 2 * patches))
