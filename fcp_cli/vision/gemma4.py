"""Gemma 4: its sequences with images as a plan runs them, and the calls of its encoder.

An image is a grid of patches of any shape, which the processor pads to the number of patches of the largest one. If the
configuration of a checkpoint says so, the tokens of an image attend to each other bidirectionally in windowed layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.arrays import IntArray
from fcp_cli.errors import RunError
from fcp_cli.masks import CAUSAL, token_types
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
    """Make one sequence from the output of the model's processor, with the mask of its images.

    Args:
        config: the configuration of the whole model (`Gemma4Config`).
        input_ids: [tokens] with placeholders, one for each square of patches that becomes a token.
        labels: [tokens], -100 where a token is not to be learned; None learns every token.
        pixel_values: [images, most patches, values]; a function is called only on the rank that encodes them.
        image_position_ids: [images, most patches, 2] column and row of each patch, -1 in padding.

    Raises:
        RunError: placeholders and images do not fit, or there are videos or sounds.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    for other in ("video", "audio"):
        if (ids == getattr(config, f"{other}_token_id", None)).any():
            raise RunError(f"a sequence has {other} placeholders; of Gemma 4, text and images alone follow a plan")
    is_image = ids == config.image_token_id
    places, grids = np.flatnonzero(is_image), _grids(image_position_ids)
    area = config.vision_config.pooling_kernel_size**2
    tokens = [height * width // area for height, width in grids]
    if sum(tokens) != len(places) or (tokens and pixel_values is None):
        raise RunError(
            f"a sequence has {len(places)} image placeholders (token {config.image_token_id}), but its "
            f"{len(tokens)} images make {sum(tokens)} tokens{'' if pixel_values is not None else ', without pixels'}; "
            "give the processor's pixel_values and image_position_ids of this very sequence"
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
    """Return [embeddings, 1, hidden] of this member's images; of a blank one, as small as can be, if it has none.

    Args:
        model: the `Gemma4Model`.
        parts: the parts to encode.
        pixels: [images, most patches, values] of all of them; None if there are none.
    """
    vision, tower = model.config.vision_config, model.vision_tower
    side = vision.pooling_kernel_size
    grids = [part.grid for part in parts] or [(side, side)]
    if pixels is None:
        pixels = torch.zeros(1, side * side, 3 * vision.patch_size**2)
    positions = torch.from_numpy(position_ids(grids))
    most = positions.shape[1]  # of these images, the processor's padding is for any
    found = model.get_image_features(
        pixels[:, :most].to(tower.device, tower.dtype), positions.to(tower.device), return_dict=True
    )
    return torch.cat(found.pooler_output).unsqueeze(1)


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the arguments of the model's forward that take the place of its pixels, per kind of picture.

    Args:
        embeddings: [visual tokens of this rank, 1, hidden].
        kinds: the kind of each visual token, in the order of `embeddings`; all are images here.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    of_each: Any = (embeddings.squeeze(1),)  # where transformers has those of each image
    return {"image": BaseModelOutputWithPooling(pooler_output=of_each)}


def position_ids(grids: Sequence[tuple[int, int]]) -> IntArray:
    """Return [images, patches of the largest, 2] as the processor's, for images of (height, width) patches."""
    found = np.full((len(grids), max((height * width for height, width in grids), default=0), 2), -1)
    for own, grid in zip(found, grids, strict=True):
        own[: grid[0] * grid[1]] = _positions(*grid)
    return found


def _grids(image_position_ids: Any) -> list[tuple[int, int]]:
    """Return height and width of each image in patches; raise RunError unless patches stand row by row."""
    found = []
    for number, of_image in enumerate([] if image_position_ids is None else np.asarray(image_position_ids)):
        width, height = (int(side) + 1 for side in of_image.max(axis=0))
        patches = of_image[: height * width]
        if not np.array_equal(patches, _positions(height, width)) or (of_image[height * width :] != -1).any():
            raise RunError(
                f"the image_position_ids of image {number} are not those of {height} rows of {width} patches and "
                "padding behind them; give the processor's"
            )
        found.append((height, width))
    return found


def _positions(height: int, width: int) -> IntArray:
    """Return [patches, 2] column and row of each patch, row by row."""
    return np.stack((np.tile(np.arange(width), height), np.repeat(np.arange(height), width)), axis=1)


def _work(vision: Any, height: int, width: int) -> float:
    """Count multiplications of one encoder layer: seven matrix products per patch, two of attention per pair."""
    patches = height * width
    hidden: int = vision.hidden_size
    return float(patches * hidden * (4 * hidden + 3 * vision.intermediate_size + 2 * patches))
