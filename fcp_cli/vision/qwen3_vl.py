"""Qwen3-VL and Qwen3.5: builds sequences for a plan, and calls the vision encoder.

    def fetch(row):
        inputs = processor(...)  # or its stored fields
        return visual_sequence(model.config, inputs.input_ids[0], image_grid_thw=inputs.image_grid_thw, ...)

A frame pair is encoded like an image: attention stays within it, and neither positions nor patches depend on time, so a
video can be split between frame pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.util.arrays import IntArray
from fcp_cli.vision.grids import by_kind, grid_parts, run_tower
from fcp_cli.vision.parts import Kind, Pixels, VisualPart, VisualSequence


def visual_sequence(
    config: Any,
    input_ids: Any,
    *,
    labels: Any = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
    pixel_values: Pixels | None = None,
    pixel_values_videos: Pixels | None = None,
) -> VisualSequence:
    """Build a sequence from the output of the model's processor.

    Args:
        config: configuration of the full model (`Qwen3VLConfig`).
        input_ids: [tokens] with placeholders.
        labels: [tokens], -100 for tokens not trained; None trains every token.
        image_grid_thw, video_grid_thw: [images or videos, 3] patches in time, height and width.
        pixel_values, pixel_values_videos: [patches, values]; a function is called only on the encoding rank.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    vision = config.vision_config
    images = grid_parts(config, ids, "image", image_grid_thw, pixel_values, work=partial(_work, vision))
    videos = grid_parts(config, ids, "video", video_grid_thw, pixel_values_videos, work=partial(_work, vision))
    parts = tuple(sorted(chain(*images, *videos), key=lambda part: part.start_token))
    positions = _position_ids(len(ids), parts, vision.spatial_merge_size) if parts else None
    return VisualSequence(tokens=ids, labels=labels, parts=parts, position_ids=positions)


def encode(model: Any, parts: Sequence[VisualPart], pixels: Tensor | None) -> Tensor:
    """Return the embeddings [embeddings, 1 + deepstack levels, hidden] of this rank's parts, or of a blank patch.

    The blank patch makes DDP and FSDP hooks run on every rank; its embedding is not used.

    Args:
        model: the `Qwen3VLModel`.
        parts: the parts to encode.
        pixels: [patches, values]; None if there are none.
    """
    found = run_tower(model, parts, pixels)
    deepstack = getattr(found, "deepstack_features", None) or ()  # Qwen3.5 has none
    return torch.stack((found.pooler_output, *deepstack), dim=1)


def encoder_outputs(embeddings: Tensor, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return the arguments of the model's forward that replace pixels.

    Both kinds are always present, so that the autograd graph of every rank reaches the encoder.

    Args:
        embeddings: [visual tokens of this rank, 1 + deepstack levels, hidden].
        kinds: kind of each token.
    """
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    outputs: dict[str, Any] = {}
    for kind, chosen in by_kind(embeddings, kinds).items():
        first, *deepstack = chosen.unbind(1)
        per_image: Any = (first,), [(level,) for level in deepstack]  # transformers expects a tensor per image
        outputs[kind] = BaseModelOutputWithDeepstackFeatures(
            pooler_output=per_image[0], deepstack_features=per_image[1]
        )
    return outputs


def _work(vision: Any, height: int, width: int) -> float:
    """Count multiplications of an encoder layer: six matrix products per patch, two of attention per pair."""
    patches = height * width
    hidden: int = vision.hidden_size
    per_patch: int = hidden * (4 * hidden + 2 * vision.intermediate_size + 2 * patches)
    return float(patches * per_patch)


def _position_ids(length: int, parts: Sequence[VisualPart], merge: int) -> IntArray:
    """Return the time, height and width position of each token, [3, length], as `Qwen3VLModel.get_rope_index`.

    Text advances all three equally. A part has a single time position, and the text after it continues after its longer
    side.
    """
    positions = np.empty((3, length), dtype=np.int64)
    at = position = 0
    for part in parts:
        text = part.start_token - at
        positions[:, at : part.start_token] = position + np.arange(text)
        position += text
        height, width = part.grid[0] // merge, part.grid[1] // merge
        at = part.start_token + part.num_tokens
        positions[0, part.start_token : at] = position
        positions[1, part.start_token : at] = position + np.repeat(np.arange(height), width)
        positions[2, part.start_token : at] = position + np.tile(np.arange(width), height)
        position += max(height, width)
    positions[:, at:] = position + np.arange(length - at)
    return positions
